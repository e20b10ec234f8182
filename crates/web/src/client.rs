//! Reads one answer of another server.

use std::time::Duration;
use ureq_proto::http::StatusCode;

/// Reason why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The server cannot be reached, is silent, or does not speak HTTP.
    #[error("{0}")]
    Transport(#[from] Box<ureq::Error>),
    /// The server has refused.
    #[error("it answers {0}")]
    Status(StatusCode),
}

/// Reads the body at an `http://` URL. Blocks for `within` at most, and reads at most `bytes_max`
/// bytes. Follows no redirection and uses no proxy, so only the server that the URL names is asked.
pub fn fetch(url: &str, within: Duration, bytes_max: u64) -> Result<Vec<u8>, FetchError> {
    let config = ureq::Agent::config_builder()
        .timeout_global(Some(within))
        .max_redirects(0)
        .proxy(None)
        .http_status_as_error(false)
        .build();
    let mut response = ureq::Agent::new_with_config(config).get(url).call().map_err(Box::new)?;
    match response.status() {
        StatusCode::OK => Ok(response.body_mut().with_config().limit(bytes_max).read_to_vec().map_err(Box::new)?),
        other => Err(FetchError::Status(other)),
    }
}
