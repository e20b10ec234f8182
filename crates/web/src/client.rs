//! Posts a message to another server once.

use std::time::Duration;
use ureq_proto::http::StatusCode;

/// Reason why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The server cannot be reached, is silent, or does not speak HTTP.
    #[error(transparent)]
    Transport(#[from] Box<ureq::Error>),
    /// The server has refused.
    #[error("it answers {0}")]
    Status(StatusCode),
}

/// Posts a message to an `http://` URL, and returns the body of the answer. Blocks for `within` at
/// most, and reads at most `bytes_max` bytes. Follows no redirection and uses no proxy, so only the
/// server that the URL names is asked.
pub fn post(
    url: &str,
    content_type: &str,
    message: &[u8],
    within: Duration,
    bytes_max: u64,
) -> Result<Vec<u8>, FetchError> {
    let config = ureq::Agent::config_builder()
        .timeout_global(Some(within))
        .max_redirects(0)
        .proxy(None)
        .http_status_as_error(false)
        .build();
    let agent = ureq::Agent::new_with_config(config);
    let mut response = agent.post(url).content_type(content_type).send(message).map_err(Box::new)?;
    match response.status() {
        StatusCode::OK => Ok(response.body_mut().with_config().limit(bytes_max).read_to_vec().map_err(Box::new)?),
        other => Err(FetchError::Status(other)),
    }
}
