//! Changes that the page may make with `--allow-changes`: near budgets and pools of jobs of this machine.

use super::access::TokenGuard;
use crate::near;
use crate::size::Size;
use farfield_pager::runner::{ByteSize, find_control, switch_pool};
use farfield_web::{StatusCode, WebRequest, WebResponse, text};
use std::path::Path;

/// Decides who may change something, and changes it.
pub(super) struct ChangeGate {
    guard: TokenGuard,
    /// Token for the memory servers of a pool to which a job is moved.
    server_token: Vec<u8>,
}

#[derive(serde::Deserialize)]
struct NearChange {
    pid: u32,
    size: String,
}

#[derive(serde::Deserialize)]
struct PoolChange {
    pid: u32,
    url: String,
}

impl ChangeGate {
    /// Reads the token. Fails if others could read or guess it.
    pub(super) fn open(file: &Path, server_token: Vec<u8>) -> anyhow::Result<ChangeGate> {
        Ok(ChangeGate { guard: TokenGuard::open("--allow-changes", file)?, server_token })
    }

    /// Reads the token again. If the file cannot be used, the token stays.
    pub(super) fn reload(&self) -> anyhow::Result<()> {
        self.guard.reload()
    }

    /// Makes a change, if the request has the token. Blocks until the runner of the job has answered.
    pub(super) fn answer(&self, path: &str, request: &WebRequest) -> WebResponse {
        let shown = request.headers().get("authorization").map(|value| value.as_bytes()).unwrap_or_default();
        let shown = shown.strip_prefix(b"Bearer ").unwrap_or_default();
        if !self.guard.admits(shown) {
            return text(
                StatusCode::UNAUTHORIZED,
                "the token is wrong: it is the first line of the file of --allow-changes",
            );
        }
        // A form of a stranger's page cannot have this type without asking first.
        if request.headers().get("content-type").is_none_or(|kind| kind.as_bytes() != b"application/json") {
            return text(StatusCode::UNSUPPORTED_MEDIA_TYPE, "a change is application/json");
        }
        match self.change(path, request.body()) {
            Ok(what) => {
                crate::say(&format!("by the dashboard: {what}"));
                text(StatusCode::OK, what)
            }
            Err(error) => text(StatusCode::BAD_REQUEST, format!("{error:#}")),
        }
    }

    fn change(&self, path: &str, body: &[u8]) -> anyhow::Result<String> {
        match path {
            "/api/near" => {
                let NearChange { pid, size } = serde_json::from_slice(body)?;
                let size: Size = size.parse().map_err(anyhow::Error::msg)?;
                let (runner, control) = find_control(pid)?;
                let bytes = near::offer(&control, size)?;
                Ok(format!("job {runner} is offered {}", ByteSize(bytes)))
            }
            _ => {
                let PoolChange { pid, url } = serde_json::from_slice(body)?;
                let (runner, control) = find_control(pid)?;
                let target = (url != "first").then_some(url.as_str());
                switch_pool(&control, target, &self.server_token)?;
                Ok(format!("job {runner} moves to {url}"))
            }
        }
    }
}
