//! Files of a trace as streams: tables of text, folders and archives of them, packed or not.

use super::ReplayError;
use std::fs::File;
use std::io::{BufRead, BufReader, Cursor, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longest line.
const LINE_MAX: usize = 64 << 10;
/// Most files of a folder or an archive.
const FILES_MAX: usize = 100_000;
/// Bytes of a block of an archive, and where its format is named.
const TAR_BLOCK: usize = 512;
const TAR_MAGIC: (usize, &[u8]) = (257, b"ustar");
/// Programs that unpack, by the first bytes of what they packed.
const PACKERS: [(&[u8], &str); 2] = [(&[0x28, 0xb5, 0x2f, 0xfd], "zstd"), (&[0x1f, 0x8b], "gzip")];
/// Time that an unpacker has to end after its last byte, and the interval between two looks.
const END_WITHIN: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Lines of a file, one at a time.
pub(super) struct Lines<'a> {
    file: String,
    input: &'a mut dyn BufRead,
    line: usize,
    buffer: Vec<u8>,
}

impl<'a> Lines<'a> {
    fn new(file: String, input: &'a mut dyn BufRead) -> Lines<'a> {
        Lines { file, input, line: 0, buffer: Vec::new() }
    }

    /// Returns the next line that is not empty, or `None` at the end.
    pub(super) fn next(&mut self) -> Result<Option<&str>, ReplayError> {
        loop {
            self.buffer.clear();
            let mut limited = Read::take(&mut *self.input, LINE_MAX as u64 + 1);
            let read = limited.read_until(b'\n', &mut self.buffer);
            let length = read.map_err(|error| ReplayError::read(&self.file, &error))?;
            if length == 0 {
                return Ok(None);
            }
            self.line += 1;
            if length > LINE_MAX {
                return Err(self.wrong(format!("is longer than {LINE_MAX} bytes")));
            }
            if self.buffer.last() != Some(&b'\n') {
                return Err(self.wrong("has no line break at its end; was the file cut short?"));
            }
            if !self.buffer.trim_ascii().is_empty() {
                break;
            }
        }
        match std::str::from_utf8(self.buffer.trim_ascii()) {
            Ok(line) => Ok(Some(line)),
            Err(_) => Err(self.wrong("is not text")),
        }
    }

    /// Returns an error of the line that was read last.
    pub(super) fn wrong(&self, message: impl Into<String>) -> ReplayError {
        ReplayError::Row { file: self.file.clone(), line: self.line, message: message.into() }
    }

    /// Returns the name of the file.
    pub(super) fn file(&self) -> &str {
        &self.file
    }
}

/// Reads all tables of a file, an archive or a folder, one after the other.
pub(super) fn each_table(
    path: &Path,
    on_table: &mut dyn FnMut(&mut Lines<'_>) -> Result<(), ReplayError>,
) -> Result<(), ReplayError> {
    let name = path.display().to_string();
    let failed = |error: &std::io::Error| ReplayError::read(&name, error);
    if path.is_dir() {
        return each_file(path, on_table);
    }
    let mut file = File::open(path).map_err(|error| failed(&error))?;
    let first = first_bytes(&mut file).map_err(|error| failed(&error))?;
    let Some((_, packer)) = PACKERS.iter().find(|(magic, _)| first.starts_with(magic)) else {
        return table_or_archive(&name, Cursor::new(first).chain(file), on_table);
    };
    // The unpacker begins anew.
    let file = File::open(path).map_err(|error| failed(&error))?;
    let mut child = UnpackProcess::start(packer, &name, file)?;
    let output = child.output()?;
    table_or_archive(&name, output, on_table)?;
    child.end()
}

fn each_file(
    folder: &Path,
    on_table: &mut dyn FnMut(&mut Lines<'_>) -> Result<(), ReplayError>,
) -> Result<(), ReplayError> {
    let name = folder.display().to_string();
    let failed = |error: &std::io::Error| ReplayError::read(&name, error);
    let mut files = Vec::new();
    for entry in folder.read_dir().map_err(|error| failed(&error))? {
        let path = entry.map_err(|error| failed(&error))?.path();
        if path.extension().is_some_and(|extension| extension == "csv") {
            files.push(path);
        }
        if files.len() > FILES_MAX {
            return Err(ReplayError::Packed { file: name, message: format!("has more than {FILES_MAX} files") });
        }
    }
    // Folders have no order.
    files.sort();
    for path in files {
        let file = File::open(&path).map_err(|error| ReplayError::read(&path.display().to_string(), &error))?;
        on_table(&mut Lines::new(path.display().to_string(), &mut BufReader::new(file)))?;
    }
    Ok(())
}

/// Reads as many bytes as tell the kind of a file.
fn first_bytes(input: &mut impl Read) -> std::io::Result<Vec<u8>> {
    let mut first = Vec::new();
    input.take(TAR_BLOCK as u64).read_to_end(&mut first)?;
    Ok(first)
}

fn table_or_archive(
    name: &str,
    mut input: impl Read,
    on_table: &mut dyn FnMut(&mut Lines<'_>) -> Result<(), ReplayError>,
) -> Result<(), ReplayError> {
    let first = first_bytes(&mut input).map_err(|error| ReplayError::read(name, &error))?;
    let (at, magic) = TAR_MAGIC;
    let is_archive = first.get(at..).is_some_and(|rest| rest.starts_with(magic));
    let mut input = BufReader::new(Cursor::new(first).chain(input));
    if is_archive {
        return each_member(name, &mut input, on_table);
    }
    on_table(&mut Lines::new(name.to_owned(), &mut input))
}

/// Reads the tables of an archive (POSIX `ustar`). Other members than files are skipped.
fn each_member(
    archive: &str,
    input: &mut dyn BufRead,
    on_table: &mut dyn FnMut(&mut Lines<'_>) -> Result<(), ReplayError>,
) -> Result<(), ReplayError> {
    let wrong = |message: String| ReplayError::Packed { file: archive.to_owned(), message };
    for members in 0.. {
        let mut block = [0; TAR_BLOCK];
        input.read_exact(&mut block).map_err(|_| wrong("ends within an archive; was it cut short?".into()))?;
        if block.iter().all(|byte| *byte == 0) {
            // The unpacker is not left with a pipe that nobody reads.
            return std::io::copy(input, &mut std::io::sink())
                .map(drop)
                .map_err(|error| ReplayError::read(archive, &error));
        }
        let member = MemberHeader::parse(&block).ok_or_else(|| wrong(format!("has a wrong header, {members}")))?;
        if members >= FILES_MAX {
            return Err(wrong(format!("has more than {FILES_MAX} files")));
        }
        let mut content = Read::take(&mut *input, member.bytes);
        if member.is_file {
            let mut lines = Lines::new(format!("{archive}/{}", member.name), &mut content);
            on_table(&mut lines)?;
        }
        let padding = member.bytes.next_multiple_of(TAR_BLOCK as u64) - member.bytes;
        let rest = content.limit() + padding;
        let skipped = std::io::copy(&mut Read::take(&mut *input, rest), &mut std::io::sink());
        let skipped = skipped.map_err(|error| ReplayError::read(archive, &error))?;
        if skipped < rest {
            return Err(wrong(format!("ends within {}; was it cut short?", member.name)));
        }
    }
    Ok(())
}

/// Header of a member of an archive.
struct MemberHeader {
    name: String,
    bytes: u64,
    is_file: bool,
}

impl MemberHeader {
    fn parse(block: &[u8; TAR_BLOCK]) -> Option<MemberHeader> {
        let text = |from: usize, to: usize| {
            let field = &block[from..to];
            let end = field.iter().position(|byte| *byte == 0).unwrap_or(field.len());
            std::str::from_utf8(&field[..end]).ok()
        };
        block[TAR_MAGIC.0..].starts_with(TAR_MAGIC.1).then_some(())?;
        // Sizes beyond 8 GiB are written in another way, and are not read.
        let bytes = u64::from_str_radix(text(124, 136)?.trim(), 8).ok()?;
        // Control characters could change a terminal.
        let name = text(0, 100)?.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
        Some(MemberHeader { name, bytes, is_file: matches!(block[156], 0 | b'0') })
    }
}

/// Program that unpacks a file. It is killed if its output is not wanted any more.
struct UnpackProcess {
    file: String,
    program: &'static str,
    child: Child,
}

impl UnpackProcess {
    fn start(program: &'static str, name: &str, file: File) -> Result<UnpackProcess, ReplayError> {
        let mut command = Command::new(program);
        command.arg("-dc").stdin(file).stdout(Stdio::piped()).stderr(Stdio::null());
        let child = command.spawn().map_err(|error| ReplayError::Packed {
            file: name.to_owned(),
            message: format!("needs the program {program}, which does not start ({error}): install it, or unpack it"),
        })?;
        Ok(UnpackProcess { file: name.to_owned(), program, child })
    }

    fn output(&mut self) -> Result<impl Read + use<>, ReplayError> {
        self.child.stdout.take().ok_or_else(|| self.wrong("has no output".to_owned()))
    }

    fn wrong(&self, message: String) -> ReplayError {
        ReplayError::Packed { file: self.file.clone(), message }
    }

    /// Waits for the end, once all output is read, and tells whether all was right.
    fn end(&mut self) -> Result<(), ReplayError> {
        let started = Instant::now();
        while started.elapsed() < END_WITHIN {
            match self.child.try_wait() {
                Ok(Some(status)) if status.success() => return Ok(()),
                Ok(Some(_)) => break,
                Ok(None) => std::thread::sleep(LOOK_EVERY),
                Err(error) => return Err(ReplayError::read(&self.file, &error)),
            }
        }
        Err(self.wrong(format!("is damaged or was cut short: {} cannot unpack it", self.program)))
    }
}

impl Drop for UnpackProcess {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    //! Guards against files that are believed although they are damaged.
    use super::*;
    use crate::sim::replay::tests::{Folder, archive};

    fn read(path: &Path) -> Result<Vec<String>, ReplayError> {
        let mut lines = Vec::new();
        each_table(path, &mut |table| {
            let file = table.file().rsplit('/').next().unwrap_or_default().to_owned();
            while let Some(line) = table.next()? {
                lines.push(format!("{file}:{line}"));
            }
            Ok(())
        })?;
        Ok(lines)
    }

    #[test]
    fn files_folders_and_archives_are_read_packed_or_not() {
        let folder = Folder::new("files");
        let table = folder.file("b.csv", b"one\r\n\n  two\n");
        folder.file("a.csv", b"");
        folder.file("readme", b"no table");
        assert_eq!(read(&table).unwrap(), ["b.csv:one", "b.csv:two"]);
        assert_eq!(read(folder.path()).unwrap(), ["b.csv:one", "b.csv:two"]);
        let tar = archive(&[("x.csv", b"1\n2\n"), ("y.csv", b""), ("z.csv", &b"3\n".repeat(400))]);
        let path = folder.file("t.tar", &tar);
        let lines = read(&path).unwrap();
        assert_eq!((lines.len(), lines[1].as_str(), lines[2].as_str()), (402, "x.csv:2", "z.csv:3"));
        let packed = folder.packed_by_gzip("t.tar");
        assert_eq!(read(&packed).unwrap(), lines);
    }

    #[test]
    fn damaged_files_are_named() {
        let folder = Folder::new("damaged");
        let check = |name: &str, bytes: &[u8], complaints: &[&str]| {
            let path = folder.file(name, bytes);
            let error = read(&path).unwrap_err().to_string();
            for complaint in complaints.iter().chain(&[name]) {
                assert!(error.contains(complaint), "{error}");
            }
        };
        check("cut.csv", b"one\ntwo", &["line 2", "cut short"]);
        check("long.csv", &[b"a\n", &[b'x'; LINE_MAX + 5][..]].concat(), &["line 2", "longer than"]);
        check("bytes.csv", b"a\n\xff\xfe\n", &["line 2", "is not text"]);
        let tar = archive(&[("x.csv", b"1\n2\n"), ("y.csv", &b"3\n".repeat(400))]);
        check("a.tar", &tar[..TAR_BLOCK + 2], &["ends within x.csv"]);
        check("b.tar", &tar[..2 * TAR_BLOCK], &["ends within an archive"]);
        check("c.tar", &tar[..3 * TAR_BLOCK + 300], &["ends within y.csv"]);
        let mut huge = tar.clone();
        huge[124..135].copy_from_slice(b"77777777777");
        check("d.tar", &huge, &["x.csv"]);
        huge[124..135].copy_from_slice(b"not a size!");
        check("e.tar", &huge, &["wrong header"]);
        folder.file("f", &b"3\n".repeat(4000));
        let packed = std::fs::read(folder.packed_by_gzip("f")).unwrap();
        check("f.gz", &packed[..packed.len() - 9], &["f.gz"]);
        check("g.gz", &packed[..4], &["g.gz", "gzip cannot unpack"]);
        assert!(read(&folder.path().join("none.csv")).unwrap_err().to_string().contains("none.csv"));
    }
}
