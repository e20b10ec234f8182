//! Client of a server that answers in JSON, such as the API server of Kubernetes.

use crate::client::FetchError;
use crate::tls::{TlsFileError, certificates};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use ureq::tls::{Certificate, RootCerts, TlsConfig};
use ureq_proto::http::{Method, Request, Response, StatusCode};

/// Client that keeps connections to one server. Follows no redirection and uses no proxy.
#[derive(Clone, Debug)]
pub struct ApiClient {
    base: String,
    agent: ureq::Agent,
}

/// Answer of the server, also one that refuses.
#[derive(Clone, Debug)]
pub struct ApiAnswer {
    /// Status of the answer.
    pub status: StatusCode,
    /// Body of the answer.
    pub body: Vec<u8>,
}

impl ApiClient {
    /// Makes a client of the server at `base`, an `http://` or `https://` URL without a path. Over
    /// `https://`, it believes the authorities of the PEM file and no others.
    pub fn new(base: &str, authorities: Option<&Path>) -> Result<ApiClient, TlsFileError> {
        let roots = authorities.map(certificates).transpose()?.unwrap_or_default();
        let roots: Vec<_> = roots.iter().map(|der| Certificate::from_der(der).to_owned()).collect();
        let tls = TlsConfig::builder()
            .root_certs(RootCerts::Specific(Arc::new(roots)))
            .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .build();
        let config = ureq::Agent::config_builder()
            .tls_config(tls)
            .max_redirects(0)
            .proxy(None)
            .http_status_as_error(false)
            .build();
        Ok(ApiClient { base: base.trim_end_matches('/').to_owned(), agent: ureq::Agent::new_with_config(config) })
    }

    /// Reads the body at a path, of at most `bytes_max` bytes. Blocks for `within` at most.
    pub fn get(
        &self,
        path: &str,
        token: Option<&str>,
        within: Duration,
        bytes_max: u64,
    ) -> Result<ApiAnswer, FetchError> {
        let request = self.agent.get(format!("{}{path}", self.base)).config().timeout_global(Some(within)).build();
        answer(authorized(request, token).call(), bytes_max)
    }

    /// Sends a message in JSON, and returns the answer. Blocks for `within` at most. After an error, the
    /// server may have received the message or not.
    pub fn send(
        &self,
        method: Method,
        path: &str,
        token: Option<&str>,
        message: &[u8],
        within: Duration,
        bytes_max: u64,
    ) -> Result<ApiAnswer, FetchError> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.base));
        request = request.header("content-type", "application/json");
        if let Some(token) = token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let request = request.body(message).map_err(|error| Box::new(ureq::Error::Http(error)))?;
        let request =
            self.agent.configure_request(request).timeout_global(Some(within)).allow_non_standard_methods(true);
        answer(self.agent.run(request.build()), bytes_max)
    }

    /// Opens a stream of lines, which ends after `within` at the latest.
    pub fn lines(&self, path: &str, token: Option<&str>, within: Duration) -> Result<ApiLines, FetchError> {
        let request = self.agent.get(format!("{}{path}", self.base)).config().timeout_global(Some(within)).build();
        let response = authorized(request, token).call().map_err(Box::new)?;
        match response.status() {
            StatusCode::OK => Ok(ApiLines(BufReader::new(Box::new(response.into_body().into_reader())))),
            other => Err(FetchError::Status(other)),
        }
    }
}

fn authorized<B>(request: ureq::RequestBuilder<B>, token: Option<&str>) -> ureq::RequestBuilder<B> {
    match token {
        Some(token) => request.header("authorization", format!("Bearer {token}")),
        None => request,
    }
}

fn answer(response: Result<Response<ureq::Body>, ureq::Error>, bytes_max: u64) -> Result<ApiAnswer, FetchError> {
    let mut response = response.map_err(Box::new)?;
    let body = response.body_mut().with_config().limit(bytes_max).read_to_vec().map_err(Box::new)?;
    Ok(ApiAnswer { status: response.status(), body })
}

/// Lines that a server sends one by one.
pub struct ApiLines(BufReader<Box<dyn Read + Send>>);

impl core::fmt::Debug for ApiLines {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("ApiLines")
    }
}

impl ApiLines {
    /// Waits for the next line, without its end. Returns `None` when the server has no more. A line that
    /// is longer than `bytes_max` is an error.
    pub fn next_line(&mut self, bytes_max: u64) -> std::io::Result<Option<Vec<u8>>> {
        let mut line = Vec::new();
        (&mut self.0).take(bytes_max).read_until(b'\n', &mut line)?;
        match line.pop() {
            None => Ok(None),
            Some(b'\n') => Ok(Some(line)),
            Some(_) => Err(std::io::Error::new(std::io::ErrorKind::InvalidData, "a line is cut short, or too long")),
        }
    }
}
