//! Classification of executables: can the dynamic loader load our library into this file?
//!
//! The check is a pure look at the first bytes of an executable: no I/O, no allocation, nothing
//! that can panic. It runs on files that anybody can write, in the runner before a start and inside
//! programs on `execve`. Only a 64-bit x86 ELF file with an interpreter (`PT_INTERP`) has a dynamic
//! loader that honours `LD_PRELOAD`.

/// Kind of an executable: what the kernel and the loader will do with it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Linkage<'a> {
    /// A program that a dynamic loader loads.
    Dynamic {
        /// Path of the loader: `PT_INTERP`, without the final zero.
        interpreter: &'a [u8],
    },
    /// A program without a dynamic loader: static, or static position-independent.
    Static,
    /// A script that begins with `#!`: another program reads it.
    Script {
        /// Path of the program that reads the script.
        interpreter: &'a [u8],
        /// Rest of the `#!` line, as one argument; empty if there is none.
        argument: &'a [u8],
    },
    /// A 32-bit program (i386, x32).
    Bits32,
    /// 64-bit ELF of another machine or byte order.
    Foreign {
        /// The field `e_machine`.
        machine: u16,
    },
    /// Neither ELF nor `#!`. The kernel refuses the file with `ENOEXEC`, and shells then read it as
    /// a script of their own.
    Unknown,
    /// An ELF file that is broken, or not a program (object file, core).
    Malformed,
    /// Undecided: the caller has to ask again with at least this many bytes of the file.
    More {
        /// Bytes needed from the start of the file.
        bytes: u64,
    },
}

/// Bytes that suffice for nearly every file.
pub const HEAD_BYTES: usize = 4096;
/// Length at which the kernel cuts `#!` lines (`BINPRM_BUF_SIZE`).
const SCRIPT_BYTES: usize = 256;
/// Longest interpreter path (`PATH_MAX`).
const INTERPRETER_BYTES_MAX: u64 = 4096;
/// Bytes of an ELF header and of one program header.
const HEADER_BYTES: usize = 64;
const SEGMENT_BYTES: usize = 56;

const ET_EXEC: u16 = 2;
const ET_DYN: u16 = 3;
const EM_X86_64: u16 = 62;
const PT_INTERP: u32 = 3;

/// Classifies a file by `head`, its first bytes: the whole file, or at least [`HEAD_BYTES`] of it.
pub fn classify(head: &[u8]) -> Linkage<'_> {
    if head.starts_with(b"#!") {
        return classify_script(head);
    }
    if !head.starts_with(b"\x7fELF") {
        return Linkage::Unknown;
    }
    let Some(header) = head.get(..HEADER_BYTES) else {
        // A 32-bit header is shorter; its fifth byte says so.
        return if head.get(4) == Some(&1) { Linkage::Bits32 } else { Linkage::Malformed };
    };
    let (class, order) = (header[4], header[5]);
    if class == 1 {
        return Linkage::Bits32;
    }
    let machine = if order == 2 { u16::from_be_bytes([header[18], header[19]]) } else { u16_at(header, 18) };
    if class != 2 || !(1..=2).contains(&order) {
        return Linkage::Malformed;
    }
    if order != 1 || machine != EM_X86_64 {
        return Linkage::Foreign { machine };
    }
    if !matches!(u16_at(header, 16), ET_EXEC | ET_DYN) || usize::from(u16_at(header, 54)) != SEGMENT_BYTES {
        return Linkage::Malformed;
    }
    classify_segments(head, u64_at(header, 32), u16_at(header, 56))
}

/// Checks whether this is the dynamic loader of musl, which cannot load a library built against
/// glibc.
pub fn is_musl(interpreter: &[u8]) -> bool {
    file_name(interpreter).starts_with(b"ld-musl")
}

/// Returns the part of `path` after its last slash.
pub fn file_name(path: &[u8]) -> &[u8] {
    match path.iter().rposition(|&byte| byte == b'/') {
        Some(slash) => path.get(slash + 1..).unwrap_or_default(),
        None => path,
    }
}

fn classify_segments(head: &[u8], table: u64, count: u16) -> Linkage<'_> {
    let Some(end) = table.checked_add(u64::from(count) * SEGMENT_BYTES as u64) else {
        return Linkage::Malformed;
    };
    let Some(segments) = slice(head, table, end) else {
        return Linkage::More { bytes: end };
    };
    let Some(interp) = segments.chunks_exact(SEGMENT_BYTES).find(|segment| u32_at(segment, 0) == PT_INTERP) else {
        return Linkage::Static;
    };
    let (start, length) = (u64_at(interp, 8), u64_at(interp, 32));
    // The kernel wants at least one character and the final zero.
    let Some(end) = start.checked_add(length).filter(|_| (2..=INTERPRETER_BYTES_MAX).contains(&length)) else {
        return Linkage::Malformed;
    };
    let Some(path) = slice(head, start, end) else {
        return Linkage::More { bytes: end };
    };
    match path.iter().position(|&byte| byte == 0) {
        Some(length) if length > 0 => Linkage::Dynamic { interpreter: &path[..length] },
        _ => Linkage::Malformed,
    }
}

fn classify_script(head: &[u8]) -> Linkage<'_> {
    let line = &head[2..head.len().min(SCRIPT_BYTES)];
    let line = match line.iter().position(|&byte| byte == b'\n') {
        Some(end) => &line[..end],
        None => line,
    };
    let line = trim(line);
    let split = line.iter().position(|&byte| matches!(byte, b' ' | b'\t' | 0)).unwrap_or(line.len());
    let (interpreter, argument) = line.split_at(split);
    if interpreter.is_empty() {
        return Linkage::Malformed;
    }
    Linkage::Script { interpreter, argument: trim(argument) }
}

fn trim(mut text: &[u8]) -> &[u8] {
    while let [b' ' | b'\t', rest @ ..] = text {
        text = rest;
    }
    while let [rest @ .., b' ' | b'\t'] = text {
        text = rest;
    }
    text
}

fn slice(bytes: &[u8], start: u64, end: u64) -> Option<&[u8]> {
    bytes.get(usize::try_from(start).ok()?..usize::try_from(end).ok()?)
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes.get(at..at + N).and_then(|field| field.try_into().ok()).unwrap_or([0; N])
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array(bytes, at))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(bytes, at))
}

/// Hand-made files, for tests here and in the runner.
#[cfg(test)]
pub(crate) mod samples {
    use super::*;

    /// Makes an ELF file with one segment of type `segment`, whose contents follow the headers at
    /// once.
    pub(crate) fn elf(segment: u32, contents: &[u8]) -> Vec<u8> {
        let mut file = vec![0u8; HEADER_BYTES + SEGMENT_BYTES];
        file[..8].copy_from_slice(b"\x7fELF\x02\x01\x01\x00");
        file[16..18].copy_from_slice(&ET_DYN.to_le_bytes());
        file[18..20].copy_from_slice(&EM_X86_64.to_le_bytes());
        file[32..40].copy_from_slice(&(HEADER_BYTES as u64).to_le_bytes());
        file[54..56].copy_from_slice(&(SEGMENT_BYTES as u16).to_le_bytes());
        file[56..58].copy_from_slice(&1u16.to_le_bytes());
        let start = (HEADER_BYTES + SEGMENT_BYTES) as u64;
        file[64..68].copy_from_slice(&segment.to_le_bytes());
        file[72..80].copy_from_slice(&start.to_le_bytes());
        file[96..104].copy_from_slice(&(contents.len() as u64).to_le_bytes());
        file.extend_from_slice(contents);
        file
    }
}

#[cfg(test)]
mod tests {
    //! Danger: a program that silently runs without far memory, or a file that makes us read out of bounds.
    use super::*;

    const LOADER: &[u8] = b"/lib64/ld-linux-x86-64.so.2";

    fn dynamic() -> Vec<u8> {
        samples::elf(PT_INTERP, b"/lib64/ld-linux-x86-64.so.2\0")
    }

    fn changed(at: usize, bytes: &[u8]) -> Vec<u8> {
        let mut file = dynamic();
        file[at..at + bytes.len()].copy_from_slice(bytes);
        file
    }

    #[test]
    fn files_are_told_apart() {
        assert_eq!(classify(&dynamic()), Linkage::Dynamic { interpreter: LOADER });
        assert_eq!(classify(&samples::elf(1, b"")), Linkage::Static);
        assert_eq!(classify(&changed(4, &[1])), Linkage::Bits32);
        assert_eq!(classify(b"\x7fELF\x01"), Linkage::Bits32);
        assert_eq!(classify(&changed(18, &183u16.to_le_bytes())), Linkage::Foreign { machine: 183 });
        let big_endian_s390 = [&[2u8][..], &[0; 12], &22u16.to_be_bytes()].concat();
        assert_eq!(classify(&changed(5, &big_endian_s390)), Linkage::Foreign { machine: 22 });
        assert_eq!(classify(&changed(16, &1u16.to_le_bytes())), Linkage::Malformed, "object file");
        assert_eq!(classify(&changed(16, &4u16.to_le_bytes())), Linkage::Malformed, "core");
        assert_eq!(classify(b""), Linkage::Unknown);
        assert_eq!(classify(b"echo hello\n"), Linkage::Unknown);
        assert_eq!(classify(b"\x7fELF"), Linkage::Malformed);
    }

    #[test]
    fn real_programs_are_dynamic() {
        for path in ["/bin/ls", "/bin/sh"] {
            let file = std::fs::read(path).unwrap();
            let Linkage::Dynamic { interpreter } = classify(&file[..HEAD_BYTES]) else {
                panic!("{path}: {:?}", classify(&file));
            };
            assert!(interpreter.starts_with(b"/lib"), "{path}");
            assert!(!is_musl(interpreter));
        }
        assert!(is_musl(b"/lib/ld-musl-x86_64.so.1"));
    }

    #[test]
    fn a_program_linked_static_is_static() {
        let folder = std::env::temp_dir().join(format!("farfield-elf-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (source, program) = (folder.join("main.c"), folder.join("main"));
        std::fs::write(&source, "int main(void) { return 0; }\n").unwrap();
        for flag in ["-static", "-static-pie"] {
            let built = std::process::Command::new("cc").arg(flag).arg("-o").args([&program, &source]).output();
            if built.is_ok_and(|output| output.status.success()) {
                assert_eq!(classify(&std::fs::read(&program).unwrap()), Linkage::Static, "{flag}");
            }
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn far_off_headers_ask_for_more() {
        assert_eq!(classify(&changed(32, &5000u64.to_le_bytes())), Linkage::More { bytes: 5000 + 56 });
        assert_eq!(
            classify(&changed(72, &9000u64.to_le_bytes())),
            Linkage::More { bytes: 9000 + LOADER.len() as u64 + 1 }
        );
        assert_eq!(classify(&changed(32, &u64::MAX.to_le_bytes())), Linkage::Malformed);
        assert_eq!(classify(&changed(72, &u64::MAX.to_le_bytes())), Linkage::Malformed);
        assert_eq!(classify(&changed(96, &(1u64 << 40).to_le_bytes())), Linkage::Malformed);
        assert_eq!(classify(&samples::elf(PT_INTERP, b"/no/zero")), Linkage::Malformed);
        assert_eq!(classify(&samples::elf(PT_INTERP, b"\0\0")), Linkage::Malformed);
    }

    #[test]
    fn scripts_name_their_interpreter() {
        let check = |text: &'static [u8], interpreter: &'static [u8], argument: &'static [u8]| {
            assert_eq!(classify(text), Linkage::Script { interpreter, argument });
        };
        check(b"#!/bin/sh\necho", b"/bin/sh", b"");
        check(b"#! /usr/bin/env python3 -u \nx", b"/usr/bin/env", b"python3 -u");
        check(b"#!/bin/sh", b"/bin/sh", b"");
        check(b"#!\t/bin/awk\t-f\n", b"/bin/awk", b"-f");
        assert_eq!(classify(b"#!\n"), Linkage::Malformed);
        assert_eq!(classify(b"#!"), Linkage::Malformed);
    }

    #[test]
    fn arbitrary_bytes_do_not_panic() {
        // Every prefix, and every byte of the headers set to values that overflow.
        let file = dynamic();
        for end in 0..file.len() {
            let _ = classify(&file[..end]);
        }
        for at in 0..HEADER_BYTES + SEGMENT_BYTES {
            for value in [0, 1, 0x7f, 0x80, 0xff] {
                let _ = classify(&changed(at, &[value]));
                let _ = classify(&changed(at & !7, &[value; 8]));
            }
        }
    }
}
