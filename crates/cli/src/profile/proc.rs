//! Parsers for `/proc`: mappings, counters and children of a process.

use farfield_core::policy::profile::AreaKind;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read, Write};

/// A mapping as `smaps` describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SmapsEntry {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) kind: AreaKind,
    pub(super) name: String,
    pub(super) resident_bytes: u64,
    pub(super) used_bytes: u64,
    /// Anonymous part: the whole mapping, or in private mappings of files the pages that the
    /// program has changed.
    pub(super) anonymous_bytes: u64,
    pub(super) huge_bytes: u64,
}

/// Counters since the process began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ProcessCounts {
    pub(super) faults: u64,
    pub(super) cpu_ticks: u64,
    pub(super) threads: u32,
    pub(super) read_bytes: u64,
    pub(super) written_bytes: u64,
}

/// Reads the mappings of a process. `text` is a buffer for reuse.
pub(super) fn mappings(pid: u32, text: &mut String) -> io::Result<Vec<SmapsEntry>> {
    text.clear();
    File::open(format!("/proc/{pid}/smaps"))?.read_to_string(text)?;
    Ok(parse_smaps(text))
}

fn parse_smaps(text: &str) -> Vec<SmapsEntry> {
    let mut mappings: Vec<SmapsEntry> = Vec::new();
    let mut code = BTreeSet::new();
    for line in text.lines() {
        if let Some((mapping, executable)) = parse_header(line) {
            if executable {
                code.insert(mapping.name.clone());
            }
            mappings.push(mapping);
            continue;
        }
        let (Some(mapping), Some((name, value))) = (mappings.last_mut(), line.split_once(':')) else {
            continue;
        };
        let field = match name {
            "Rss" => &mut mapping.resident_bytes,
            "Referenced" => &mut mapping.used_bytes,
            "Anonymous" => &mut mapping.anonymous_bytes,
            "AnonHugePages" => &mut mapping.huge_bytes,
            _ => continue,
        };
        let kib = value.split_whitespace().next().and_then(|number| number.parse::<u64>().ok());
        *field = kib.unwrap_or(0) << 10;
    }
    for mapping in mappings.iter_mut().filter(|mapping| mapping.kind == AreaKind::File) {
        // Constants of a library are as little the program's data as its instructions are.
        if code.contains(&mapping.name) {
            mapping.kind = AreaKind::Code;
        }
    }
    mappings
}

/// Parses `start-end permissions offset device inode   name`. Returns also whether the mapping is
/// executable.
fn parse_header(line: &str) -> Option<(SmapsEntry, bool)> {
    let mut words = line.split_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let [start, end] = [start, end].map(|hex| u64::from_str_radix(hex, 16).ok());
    let (start, end) = (start?, end?);
    let permissions = words.next()?;
    let inode = words.nth(2)?;
    let name = words.collect::<Vec<_>>().join(" ");
    let kind = if inode == "0" { AreaKind::Anonymous } else { AreaKind::File };
    let sizes = (0, 0, 0, 0);
    let (resident_bytes, used_bytes, anonymous_bytes, huge_bytes) = sizes;
    let mapping = SmapsEntry { start, end, kind, name, resident_bytes, used_bytes, anonymous_bytes, huge_bytes };
    Some((mapping, permissions.contains('x')))
}

/// Reads the counters of a process.
pub(super) fn counts(pid: u32) -> io::Result<ProcessCounts> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let gone = || io::Error::from(io::ErrorKind::InvalidData);
    let mut counts = parse_stat(&stat).ok_or_else(gone)?;
    // The file cannot be read if the program has changed its user.
    let io = std::fs::read_to_string(format!("/proc/{pid}/io")).unwrap_or_default();
    for line in io.lines() {
        match line.split_once(": ") {
            Some(("rchar", value)) => counts.read_bytes = value.parse().unwrap_or(0),
            Some(("wchar", value)) => counts.written_bytes = value.parse().unwrap_or(0),
            _ => {}
        }
    }
    Ok(counts)
}

fn parse_stat(stat: &str) -> Option<ProcessCounts> {
    // The name is in parentheses and may itself contain some. Fields count from the state behind
    // it.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    if matches!(fields.first(), Some(&("Z" | "X"))) {
        return None; // A zombie: its memory is gone.
    }
    let field = |index: usize| fields.get(index)?.parse::<u64>().ok();
    Some(ProcessCounts {
        faults: field(7)? + field(9)?,
        cpu_ticks: field(11)? + field(12)?,
        threads: field(17)? as u32,
        read_bytes: 0,
        written_bytes: 0,
    })
}

/// Clears the accessed bits of a process, so that `Referenced` counts again from zero.
pub(super) fn clear_used(pid: u32) -> io::Result<()> {
    File::options().write(true).open(format!("/proc/{pid}/clear_refs"))?.write_all(b"1")
}

/// Returns all descendants of this process.
pub(super) fn descendants() -> Vec<u32> {
    let mut found: Vec<u32> = Vec::new();
    let mut next = std::process::id();
    let mut seen = 0;
    loop {
        for task in std::fs::read_dir(format!("/proc/{next}/task")).into_iter().flatten().flatten() {
            let children = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
            found.extend(children.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
        }
        let Some(&pid) = found.get(seen) else {
            return found;
        };
        (next, seen) = (pid, seen + 1);
    }
}

#[cfg(test)]
mod tests {
    //! Danger: numbers of another mapping, process or field.
    use super::*;

    const SMAPS: &str = "\
55d0-55f0 r--p 00000000 fe:00 131 /usr/bin/my program
Size:                  8 kB
Rss:                   8 kB
Anonymous:             4 kB
Referenced:            8 kB
55f0-5600 r-xp 00001000 fe:00 131 /usr/bin/my program
Rss:                   4 kB
VmFlags: rd ex mr mw me
7000-9000 rw-p 00000000 00:00 0 
Rss:                 100 kB
Pss:                  50 kB
Referenced:           60 kB
Anonymous:           100 kB
AnonHugePages:        64 kB
9000-a000 r--s 00000000 fe:00 99 /data/table
Rss:                  12 kB
a000-b000 rw-p 00000000 00:00 0                          [heap]
";

    #[test]
    fn mappings_are_read_with_their_sizes() {
        let found = parse_smaps(SMAPS);
        let kinds: Vec<_> = found.iter().map(|mapping| (mapping.kind, mapping.name.as_str())).collect();
        let program = (AreaKind::Code, "/usr/bin/my program");
        let others = [(AreaKind::Anonymous, ""), (AreaKind::File, "/data/table"), (AreaKind::Anonymous, "[heap]")];
        assert_eq!(kinds[..2], [program, program]);
        assert_eq!(kinds[2..], others);
        let plain = &found[2];
        assert_eq!((plain.start, plain.end), (0x7000, 0x9000));
        assert_eq!((plain.resident_bytes, plain.used_bytes), (100 << 10, 60 << 10));
        assert_eq!((plain.anonymous_bytes, plain.huge_bytes), (100 << 10, 64 << 10));
        assert_eq!((found[0].anonymous_bytes, found[4].resident_bytes), (4 << 10, 0));
    }

    #[test]
    fn any_text_is_read_without_harm() {
        for cut in 0..SMAPS.len() {
            parse_smaps(&SMAPS[..cut]);
        }
        assert_eq!(parse_smaps("Rss: 5 kB\n\n:\nnonsense\n7-x r\n"), []);
    }

    #[test]
    fn counts_are_those_behind_any_name() {
        let stat = "5 (a) b (c)) S 1 5 5 0 -1 4 10 0 3 0 20 30 0 0 20 0 7 0 99 1 2";
        let counts = parse_stat(stat).unwrap();
        assert_eq!((counts.faults, counts.cpu_ticks, counts.threads), (13, 50, 7));
        assert_eq!(parse_stat(&stat.replace(" S ", " Z ")), None);
        assert_eq!(parse_stat("5 (a"), None);
        assert_eq!(parse_stat("5 (a) S 1"), None);
    }

    #[test]
    fn the_kernel_answers_as_we_read() {
        let pid = std::process::id();
        let memory = vec![1u8; 4 << 20];
        let found = mappings(pid, &mut String::new()).unwrap();
        let ours = found.iter().find(|m| (m.start..m.end).contains(&(memory.as_ptr() as u64))).unwrap();
        assert_eq!(ours.kind, AreaKind::Anonymous);
        assert!(ours.resident_bytes >= 4 << 20 && ours.used_bytes >= 4 << 20);
        assert!(counts(pid).unwrap().threads >= 1);
        let mut child = std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        assert!(descendants().contains(&child.id()));
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(!descendants().contains(&child.id()) && mappings(child.id(), &mut String::new()).is_err());
    }
}
