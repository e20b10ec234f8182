//! Asks another server once: reads a page, or posts a message.

use std::time::Duration;
use ureq_proto::http::{Response, StatusCode};

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

/// Reads the body at an `http://` URL. Blocks for `within` at most, and reads at most `bytes_max`
/// bytes. Follows no redirection and uses no proxy, so only the server that the URL names is asked.
pub fn fetch(url: &str, within: Duration, bytes_max: u64) -> Result<Vec<u8>, FetchError> {
    let response = agent(within).get(url).call().map_err(Box::new)?;
    body(response, bytes_max)
}

/// Posts a message to an `http://` URL, and returns the body of the answer, with the bounds of [`fetch`].
pub fn post(
    url: &str,
    content_type: &str,
    message: &[u8],
    within: Duration,
    bytes_max: u64,
) -> Result<Vec<u8>, FetchError> {
    let response = agent(within).post(url).content_type(content_type).send(message).map_err(Box::new)?;
    body(response, bytes_max)
}

fn agent(within: Duration) -> ureq::Agent {
    let config = ureq::Agent::config_builder()
        .timeout_global(Some(within))
        .max_redirects(0)
        .proxy(None)
        .http_status_as_error(false)
        .build();
    ureq::Agent::new_with_config(config)
}

fn body(mut response: Response<ureq::Body>, bytes_max: u64) -> Result<Vec<u8>, FetchError> {
    match response.status() {
        StatusCode::OK => Ok(response.body_mut().with_config().limit(bytes_max).read_to_vec().map_err(Box::new)?),
        other => Err(FetchError::Status(other)),
    }
}
