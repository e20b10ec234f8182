//! Providers: the parts of libfabric that carry the bytes.

/// Provider of libfabric that Farfield uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Provider {
    /// TCP sockets. The processors of both machines move the bytes, outside of the threads that
    /// serve requests.
    Tcp,
}

/// Reason for which a name is no provider for Farfield.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BadProvider(&'static str);

impl core::fmt::Display for BadProvider {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.0)
    }
}

impl core::error::Error for BadProvider {}

impl Provider {
    /// Returns the provider with this name; the error says why there is none, or why it is not
    /// used.
    pub fn named(name: &str) -> Result<Provider, BadProvider> {
        match name {
            "tcp" => Ok(Provider::Tcp),
            "verbs" | "efa" => Err(BadProvider(
                "cards of verbs and efa pin what they may read, and the memory of regions comes and goes page by page: \
                 use the provider tcp",
            )),
            "shm" => Err(BadProvider(
                "libfabric's shm provider is not used: a client that is killed would keep a lock of the server's for \
                 ever; on one machine shm:PATH reads without libfabric, and faster",
            )),
            _ => Err(BadProvider("it is no provider that Farfield knows: use tcp")),
        }
    }

    /// Returns the name of the provider.
    pub fn name(self) -> &'static str {
        match self {
            Provider::Tcp => "tcp",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_provider_is_known_by_its_name_and_others_are_refused_with_a_reason() {
        assert_eq!(Provider::named("tcp").map(Provider::name), Ok("tcp"));
        for (name, reason) in
            [("verbs", "pin"), ("efa", "pin"), ("shm", "shm:PATH"), ("", "use tcp"), ("TCP", "use tcp")]
        {
            let text = Provider::named(name).unwrap_err().to_string();
            assert!(text.contains(reason), "{name}: {text}");
        }
    }
}
