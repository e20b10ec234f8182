//! Options of the URL `ssd:PATH?size=8G&io=pread&device=erase`.

use std::ffi::CString;

/// Way in which bytes go to the file and back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SsdIoMode {
    /// Uses io_uring where it may be used, else calls.
    Auto,
    /// Uses io_uring.
    Uring,
    /// Uses one `pread` or `pwrite` at a time.
    Calls,
}

/// Options of an `ssd` URL.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Config {
    pub(super) path: String,
    /// Most bytes that may be stored; `None` for all that the file system or device has.
    pub(super) size_bytes: Option<u64>,
    pub(super) io: SsdIoMode,
    /// Set if the content of the block device may be lost.
    pub(super) may_erase: bool,
}

impl Config {
    /// Parses the text after `ssd:`.
    pub(crate) fn parse(text: &str) -> Result<Config, String> {
        let (path, options) = text.split_once('?').unwrap_or((text, ""));
        if path.is_empty() || path.contains('\0') {
            return Err(
                "write the folder for the file, or a block device, as in ssd:/var/tmp or ssd:/var/tmp?size=8G".into()
            );
        }
        let mut config = Config { path: path.into(), size_bytes: None, io: SsdIoMode::Auto, may_erase: false };
        for option in options.split('&').filter(|option| !option.is_empty()) {
            let (name, value) = option.split_once('=').ok_or(format!("write NAME=VALUE, not {option:?}"))?;
            match (name, value) {
                ("size", size) => config.size_bytes = Some(crate::url::size::parse(size)?),
                ("io", "auto") => config.io = SsdIoMode::Auto,
                ("io", "uring") => config.io = SsdIoMode::Uring,
                ("io", "pread") => config.io = SsdIoMode::Calls,
                ("io", other) => return Err(format!("io is auto, uring or pread, not {other:?}")),
                ("device", "erase") => config.may_erase = true,
                ("device", other) => return Err(format!("device is erase, or left out, not {other:?}")),
                _ => return Err(format!("no option of ssd is called {name:?}: known are size, io and device")),
            }
        }
        Ok(config)
    }

    /// Adapts the options to a process that is not ours. io_uring finishes its work in whatever the
    /// thread does next, which can make calls of the program return early. So it is used only if
    /// the URL says so.
    pub(crate) fn inside_a_program(mut self) -> Config {
        if self.io == SsdIoMode::Auto {
            self.io = SsdIoMode::Calls;
        }
        self
    }

    /// Returns the URL with an absolute path, so that it means the same file in every folder.
    pub(crate) fn absolute(&self, url: &str) -> Result<String, String> {
        let path = std::path::absolute(&self.path).map_err(|error| error.to_string())?;
        let path = path.to_str().ok_or("the path of this folder is not UTF-8 text")?;
        Ok(format!("ssd:{path}{}", url.strip_prefix("ssd:").unwrap_or(url).strip_prefix(&self.path).unwrap_or("")))
    }

    pub(super) fn c_path(&self) -> CString {
        CString::new(self.path.as_str()).expect("checked when it was read")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_understood_and_mistakes_explained() {
        let config = Config::parse("/var/tmp?size=8G&io=pread").unwrap();
        assert_eq!((config.path.as_str(), config.size_bytes, config.io), ("/var/tmp", Some(8 << 30), SsdIoMode::Calls));
        assert_eq!(Config::parse("x").unwrap().inside_a_program().io, SsdIoMode::Calls);
        assert_eq!(Config::parse("x?io=uring").unwrap().inside_a_program().io, SsdIoMode::Uring);
        assert!(Config::parse("/dev/x?device=erase").unwrap().may_erase);
        for (text, hint) in [
            ("", "folder"),
            ("?size=1G", "folder"),
            ("/x?size=8", "unit"),
            ("/x?size", "NAME=VALUE"),
            ("/x?io=aio", "uring or pread"),
            ("/x?device=yes", "erase"),
            ("/x?depth=3", "known are size"),
        ] {
            let why = Config::parse(text).unwrap_err();
            assert!(why.contains(hint), "{text}: {why}");
        }
    }
}
