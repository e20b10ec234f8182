//! Options of the URLs `numa:NODE?size=8G` and `dax:PATH?size=8G&device=erase`.

use std::ffi::CString;

/// Memory that a URL names.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum MemorySource {
    /// Memory of a NUMA node.
    Node(u32),
    /// Memory behind a path: a folder, a file or a device.
    Path(String),
}

/// Options of a `numa` or `dax` URL.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Config {
    pub(super) source: MemorySource,
    /// Most bytes that may be stored; `None` for all that there is room for.
    pub(super) size_bytes: Option<u64>,
    /// Set if the content of the file, or of the device, may be lost.
    pub(super) may_erase: bool,
}

impl Config {
    /// Parses the text after `numa:`.
    pub(crate) fn parse_numa(text: &str) -> Result<Config, String> {
        let (node, options) = text.split_once('?').unwrap_or((text, ""));
        let node = node.parse().map_err(|_| "write the number of a NUMA node, as in numa:1 or numa:1?size=8G")?;
        Config { source: MemorySource::Node(node), size_bytes: None, may_erase: false }.with_options("numa", options)
    }

    /// Parses the text after `dax:`.
    pub(crate) fn parse_dax(text: &str) -> Result<Config, String> {
        let (path, options) = text.split_once('?').unwrap_or((text, ""));
        if path.is_empty() || path.contains('\0') {
            let reason = "write a folder or a file on a DAX file system, or a DAX device, as in dax:/mnt/pmem?size=8G \
                          or dax:/dev/dax0.0?device=erase";
            return Err(reason.into());
        }
        Config { source: MemorySource::Path(path.into()), size_bytes: None, may_erase: false }
            .with_options("dax", options)
    }

    fn with_options(mut self, scheme: &str, options: &str) -> Result<Config, String> {
        for option in options.split('&').filter(|option| !option.is_empty()) {
            let (name, value) = option.split_once('=').ok_or(format!("write NAME=VALUE, not {option:?}"))?;
            match (scheme, name, value) {
                (_, "size", size) => self.size_bytes = Some(crate::url::size::parse(size)?),
                ("dax", "device" | "file", "erase") => self.may_erase = true,
                ("dax", "device" | "file", other) => {
                    return Err(format!("{name} is erase, or left out, not {other:?}"));
                }
                ("dax", ..) => {
                    return Err(format!("no option of dax is called {name:?}: known are size, file and device"));
                }
                _ => return Err(format!("no option of numa is called {name:?}: known is size")),
            }
        }
        Ok(self)
    }

    /// Returns the URL with an absolute path, so that it means the same memory in every folder.
    pub(crate) fn absolute(&self, url: &str) -> Result<String, String> {
        let MemorySource::Path(path) = &self.source else { return Ok(url.to_owned()) };
        let absolute = std::path::absolute(path).map_err(|error| error.to_string())?;
        let absolute = absolute.to_str().ok_or("the path of this folder is not UTF-8 text")?;
        let options = url.split_once('?').map_or(String::new(), |(_, options)| format!("?{options}"));
        Ok(format!("dax:{absolute}{options}"))
    }
}

/// Returns a path for the kernel.
pub(super) fn c_path(path: &str) -> CString {
    CString::new(path).expect("checked when it was read")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_understood_and_mistakes_explained() {
        let config = Config::parse_numa("1?size=8G").unwrap();
        assert_eq!((config.source, config.size_bytes), (MemorySource::Node(1), Some(8 << 30)));
        let config = Config::parse_dax("/mnt/pmem/far?size=1G&file=erase").unwrap();
        assert_eq!((config.source, config.may_erase), (MemorySource::Path("/mnt/pmem/far".into()), true));
        assert!(Config::parse_dax("/dev/dax0.0?device=erase").unwrap().may_erase);
        for (text, hint) in [
            ("", "numa:1"),
            ("one", "numa:1"),
            ("-1", "numa:1"),
            ("0?size=8", "unit"),
            ("0?file=erase", "known is size"),
        ] {
            let why = Config::parse_numa(text).unwrap_err();
            assert!(why.contains(hint), "{text}: {why}");
        }
        for (text, hint) in [
            ("", "dax:/mnt"),
            ("?size=1G", "dax:/mnt"),
            ("/x?size", "NAME=VALUE"),
            ("/x?file=yes", "erase"),
            ("/x?io=uring", "known are"),
        ] {
            let why = Config::parse_dax(text).unwrap_err();
            assert!(why.contains(hint), "{text}: {why}");
        }
    }

    #[test]
    fn paths_become_absolute() {
        let here = std::env::current_dir().unwrap();
        let absolute = |url: &str| Config::parse_dax(url.strip_prefix("dax:").unwrap()).unwrap().absolute(url).unwrap();
        assert_eq!(absolute("dax:far?size=1G"), format!("dax:{}/far?size=1G", here.display()));
        assert_eq!(absolute("dax:/far"), "dax:/far");
        assert_eq!(Config::parse_numa("0").unwrap().absolute("numa:0"), Ok("numa:0".into()));
    }
}
