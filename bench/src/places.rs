//! `farfield run` at one of several places, and with all of them to choose from: what it gains to choose, and to move.

use crate::advised;
use crate::contender::{Far, server_at};
use crate::job::{Job, job_on, job_with, twice};
use crate::line::Sample;
use crate::server::Server;
use anyhow::Result;
use std::ffi::OsString;

/// Where far memory is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Chooser {
    /// In a file in the scratch folder, and nowhere else.
    Disk,
    /// At a server that is farther away than those of this machine, and nowhere else.
    Distant,
    /// Where `farfield run --auto` takes it, by a profile of the program alone.
    Profile,
    /// The same without a profile: it begins at the slowest place.
    Nobody,
}

/// Hardly any waiting is allowed, so no near memory is taken away: all have what the point says.
const SLO: &str = "1.05";
/// How far the distant server is.
const DISTANCE: &str = "latency=200us,bandwidth=500M";

/// One sample.
pub(crate) fn sample(chooser: Chooser, job: &Job<'_>) -> Result<Sample> {
    match chooser {
        Chooser::Disk => job_on(Some(&disk(job)), job),
        Chooser::Distant => {
            let server = server_at(Far::Tcp, "server", job)?;
            job_on(Some(&distant(&server)), job)
        }
        Chooser::Profile => {
            let profile = advised::profile(&[], 1, job)?;
            chosen(&["--profile".into(), profile.into()], job)
        }
        Chooser::Nobody => chosen(&[], job),
    }
}

/// At whichever of the places, named from the slowest to the fastest.
fn chosen(more: &[OsString], job: &Job<'_>) -> Result<Sample> {
    let (across, shared) = (server_at(Far::Tcp, "server", job)?, server_at(Far::Private, "shared", job)?);
    let mut options: Vec<OsString> = vec!["--auto".into(), "--slo".into(), SLO.into()];
    for url in [&distant(&across), &disk(job), &across.url, &shared.url] {
        options.extend(["--far".into(), url.into()]);
    }
    options.extend_from_slice(more);
    let mut sample = job_with(&options, job)?;
    sample.figures.insert("server_cpu_s".into(), across.cpu_seconds() + shared.cpu_seconds());
    Ok(sample)
}

fn disk(job: &Job<'_>) -> String {
    format!("ssd:{}?size={}", job.scratch.display(), twice(job))
}

fn distant(server: &Server) -> String {
    format!("throttle({DISTANCE},{})", server.url)
}
