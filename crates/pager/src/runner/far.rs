//! Prepares pool URLs as the user wrote them for processes that cannot look up names, and tries
//! them out.

use super::JobRefusal;
use core::time::Duration;
use farfield_pool::{OpenError, PoolBuilder, PoolError, Protection, leaf_urls, resolve_urls};

/// Time that a server may take to answer before the program is started.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// Client name that the servers see.
const CLIENT_NAME: &str = "farfield run";

/// Returns the URLs with numeric addresses: the library inside a program must not call a resolver.
/// Refuses URLs with a leaf, however deep, that would keep far memory in the program's own.
pub(super) fn resolve(urls: &[String]) -> Result<Vec<String>, JobRefusal> {
    if let Some(leaf) = urls.iter().flat_map(|url| leaf_urls(url)).find(|leaf| leaf.starts_with("ram:")) {
        let reason = format!(
            "{leaf}: far pages would lie in the memory of the program, beside its budget: ram is for heaps and their \
             tests"
        );
        return Err(JobRefusal::Far { reason });
    }
    resolve_urls(urls).map_err(|error| JobRefusal::Url { reason: error.to_string() })
}

/// Opens a small region at every server, so that a wrong address or token is found before the
/// program starts. Returns how well the pool protects what it holds, if it does. Servers at Unix
/// sockets may be those of user `server_uid`, too.
pub(super) fn check(urls: &[String], token: &[u8], server_uid: u32) -> Result<Option<Protection>, JobRefusal> {
    pool_builder(urls, token)?
        .server_uid(server_uid)
        .inside_a_program()
        .pages(urls.len() as u64)
        .open()
        .map(|pool| pool.protection())
        .map_err(|error| JobRefusal::Far { reason: advice(&error) })
}

/// Returns the builder of the pool that the job will open, with a short deadline.
pub fn pool_builder(urls: &[String], token: &[u8]) -> Result<PoolBuilder, JobRefusal> {
    let token = String::from_utf8(token.to_vec())
        .map_err(|_| JobRefusal::Far { reason: "the token is not UTF-8 text".into() })?;
    Ok(PoolBuilder::new().urls(urls).token(token).client_name(CLIENT_NAME).deadline(ANSWER_WITHIN))
}

fn advice(error: &OpenError) -> String {
    match (error, error.pool_error()) {
        (OpenError::Refused { url, .. } | OpenError::Pool { url, .. }, _)
            if ["ssd:", "lz:", "numa:", "dax:"].iter().any(|place| url.starts_with(place)) =>
        {
            error.to_string()
        }
        (OpenError::Refused { .. }, _) | (_, Some(PoolError::Refused { .. })) => {
            format!("{error} (a token is given with --token-file or FARFIELD_TOKEN)")
        }
        (_, Some(PoolError::OtherUser { .. })) => error.to_string(),
        (_, Some(_)) => format!("{error}; is `farfield serve` running there, and may this machine connect?"),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    //! Danger: a job that starts, works for hours and then finds no far memory.
    use super::*;

    #[test]
    fn a_server_that_is_not_there_is_found_before_the_start() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        // The port of a client: nobody listens there, and nobody else gets it meanwhile.
        let client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let url = format!("tcp://{}", client.local_addr().unwrap());
        let refusal = check(std::slice::from_ref(&url), b"", 0).unwrap_err().to_string();
        assert!(refusal.contains(&url) && refusal.contains("farfield serve"), "{refusal}");
        assert!(check(&["unix:/no/such/socket".into()], b"", 0).is_err());
        assert!(check(&["ram:".into()], b"\xff", 0).is_err());
    }

    #[test]
    fn wrong_urls_are_refused_and_names_become_numbers() {
        assert_eq!(resolve(&["tcp://127.0.0.1:7400".into()]).unwrap(), ["tcp://127.0.0.1:7400"]);
        let local = resolve(&["tcp://localhost:7400".into()]).unwrap();
        assert!(local == ["tcp://127.0.0.1:7400"] || local == ["tcp://[::1]:7400"], "{local:?}");
        for url in ["ram:", "tier(ram:?size=1G,tcp://localhost:7400)", "mirror(stripe(ssd:/a,fault:die=9@ram:),ssd:/b)"]
        {
            let refusal = resolve(&[url.into()]).unwrap_err().to_string();
            assert!(refusal.contains("beside its budget"), "{refusal}");
        }
        assert!(resolve(&["ssd:/ram:".into()]).is_ok());
        for wrong in ["localhost", "ftp://x:1", "tcp://localhost"] {
            let refusal = resolve(&[wrong.into()]).unwrap_err().to_string();
            assert!(refusal.starts_with("--far"), "{refusal}");
        }
    }
}
