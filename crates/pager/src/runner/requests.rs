//! Requests of people to the runner of a running job: another pool, or none after all.
//!
//! The runner alone decides where far memory is. A process that asks writes into the runner's
//! request block, which the kernel opens to the runner's own user and root (`/proc/PID/fd`). The
//! runner answers at its next look.

use super::{ControlBlock, JobRefusal, PoolStatus, RunnerBlock, far, pool, sys};
use crate::config::{RunnerRequest, TEXT_BYTES};
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Time that the runner may take to answer. It looks twenty times a second, if it is not stopped.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// Interval between two looks of the asking process.
const LOOK: Duration = Duration::from_millis(5);

/// Asks the runner for this pool, which is tried out first, or for the one with which the job
/// began. Returns the number of the new pool. Blocks until the runner answers, at most for ten
/// seconds beside the try.
pub fn switch_pool(control: &ControlBlock, url: Option<&str>, token: &[u8]) -> Result<u32, JobRefusal> {
    let (kind, (urls, token)) = match url {
        Some(url) => (RunnerRequest::Switch, (far::resolve(&[url.to_owned()])?, token.to_vec())),
        None => (RunnerRequest::SwitchToFirst, control.config().first.read()),
    };
    if urls.iter().map(String::len).sum::<usize>() > TEXT_BYTES || token.len() > TEXT_BYTES {
        return Err(refusal("the URL, and the token, can have at most 4096 bytes"));
    }
    // Processes of the job believe servers of its runner's user, too.
    far::check(&urls, &token, control.config().runner_uid.load(Ordering::Relaxed))?;
    match kind {
        RunnerRequest::SwitchToFirst => ask(control, kind, &[], &[]),
        _ => ask(control, kind, &urls, &token),
    }
}

/// Asks the runner for the pool before, while some processes have not moved yet.
pub fn cancel_switch(control: &ControlBlock) -> Result<(), JobRefusal> {
    ask(control, RunnerRequest::Cancel, &[], &[]).map(drop)
}

fn refusal(reason: &str) -> JobRefusal {
    JobRefusal::Pool { reason: reason.to_owned() }
}

fn ask(control: &ControlBlock, kind: RunnerRequest, urls: &[String], token: &[u8]) -> Result<u32, JobRefusal> {
    let (file, requests) = control.open_requests().map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => {
            refusal("only the user of the job's `farfield run`, and root, may give it another pool")
        }
        io::ErrorKind::NotFound => refusal("the job has ended"),
        _ => JobRefusal::Os { what: "request block", error },
    })?;
    let deadline = Instant::now() + ANSWER_WITHIN;
    while !sys::try_lock(file.as_fd()).map_err(|error| JobRefusal::Os { what: "request block", error })? {
        if Instant::now() > deadline {
            return Err(refusal("somebody else is giving the job another pool in this moment: try again"));
        }
        std::thread::sleep(LOOK);
    }
    let number = requests.asked.load(Ordering::Acquire).wrapping_add(1);
    requests.pool.write(urls.join("\n").as_bytes(), token);
    requests.kind.store(kind as u32, Ordering::Relaxed);
    requests.asked.store(number, Ordering::Release);
    while requests.answered.load(Ordering::Acquire) != number {
        // A request that is taken back will not be carried out any more.
        if Instant::now() > deadline && requests.kind.swap(0, Ordering::AcqRel) != 0 {
            return Err(refusal("the job's `farfield run` does not answer: is it stopped?"));
        }
        if std::fs::symlink_metadata(control.path()).is_err() {
            return Err(refusal("the job has ended"));
        }
        std::thread::sleep(LOOK);
    }
    // The runner has its own copy: the token must not stay for later readers.
    requests.pool.write(b"", b"");
    match requests.refusal.line() {
        reason if reason.is_empty() => Ok(requests.pool_epoch.load(Ordering::Relaxed)),
        reason => Err(JobRefusal::Pool { reason }),
    }
}

/// Carries out the last request and answers it, if there is a new one. Only the runner calls this.
pub(super) fn answer(control: &RunnerBlock) {
    let requests = control.requests();
    let number = requests.asked.load(Ordering::Acquire);
    if number == requests.answered.load(Ordering::Relaxed) {
        return;
    }
    let result = match RunnerRequest::of(requests.kind.swap(0, Ordering::AcqRel)) {
        Some(RunnerRequest::Switch) => {
            let (urls, token) = requests.pool.read();
            pool::begin_switch(control, &urls, &token, "")
        }
        Some(RunnerRequest::SwitchToFirst) => {
            let (urls, token) = control.config().first.read();
            pool::begin_switch(control, &urls, &token, "")
        }
        Some(RunnerRequest::Cancel) => match PoolStatus::read(control).moving.is_empty() {
            true => Err(refusal("the job is not moving to another pool")),
            false => Ok(pool::give_up(control, "it was cancelled")),
        },
        None => Err(refusal("it was taken back")),
    };
    let (epoch, reason) = match result {
        Ok(epoch) => (epoch, String::new()),
        Err(refusal) => (0, refusal.to_string()),
    };
    requests.pool_epoch.store(epoch, Ordering::Relaxed);
    requests.refusal.write(reason.as_bytes());
    requests.answered.store(number, Ordering::Release);
}

#[cfg(test)]
mod tests {
    //! Danger: somebody who moves far memory that is not theirs; a runner that does what nobody waits for any more.
    use super::*;
    use crate::config::Capture;
    use crate::control::FaultMode;
    use crate::runner::{Settings, create_control};

    fn job() -> RunnerBlock {
        let urls = vec!["tcp://127.0.0.1:1".into()];
        let settings = Settings {
            near_limit_bytes: 1 << 30,
            mode: FaultMode::Auto,
            huge_pages: false,
            capture: Capture::Everything,
            urls,
            token: b"first".to_vec(),
        };
        create_control(&settings).unwrap()
    }

    /// Asks from another thread, while the runner answers.
    fn asked<T: Send>(control: &RunnerBlock, ask: impl FnOnce(&ControlBlock) -> T + Send) -> T {
        let looking = ControlBlock::open(control.path()).unwrap();
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| ask(&looking));
            while !asking.is_finished() {
                answer(control);
                std::thread::yield_now();
            }
            asking.join().unwrap()
        })
    }

    #[test]
    fn the_runner_does_what_is_asked_and_says_why_not() {
        let control = job();
        let place = std::env::temp_dir();
        let second = format!("ssd:{}?size=64M", place.display());
        let epoch = asked(&control, |job| switch_pool(job, Some(&second), b"other")).unwrap();
        assert_eq!(control.config().pool(), (epoch, vec![second.clone()], b"other".to_vec()));
        let refused = asked(&control, |job| switch_pool(job, Some(&second), b"")).unwrap_err();
        assert!(refused.to_string().contains("already"), "{refused}");
        let refused = asked(&control, cancel_switch).unwrap_err();
        assert!(refused.to_string().contains("not moving"), "{refused}");
        // Back, without a look at whether the first one is there: that is for who asks.
        let epoch = asked(&control, |job| ask(job, RunnerRequest::SwitchToFirst, &[], &[])).unwrap();
        assert_eq!(control.config().pool(), (epoch, vec!["tcp://127.0.0.1:1".into()], b"first".to_vec()));
        assert_eq!(control.requests().pool.read(), (vec![], vec![]), "no token stays there");
    }

    #[test]
    fn a_withdrawn_request_is_not_performed() {
        let control = job();
        let (_file, requests) = control.open_requests().unwrap();
        requests.pool.write(b"tcp://127.0.0.1:2", b"");
        requests.asked.store(1, Ordering::Release);
        answer(&control);
        assert_eq!(control.config().pool().0, 0);
        assert_eq!(requests.refusal.line(), "it was taken back");
    }

    #[test]
    fn another_user_cannot_ask() {
        // SAFETY: no arguments.
        if unsafe { libc::geteuid() } != 0 {
            return; // There is no other user to be.
        }
        use std::os::unix::process::CommandExt;
        let control = job();
        let number = control.config().requests_fd.load(Ordering::Relaxed);
        let path = control.path().with_file_name(number.to_string());
        let mut command = std::process::Command::new("sh");
        command.args(["-c", "exec 3<>\"$0\""]).arg(&path);
        assert!(command.status().unwrap().success(), "its own user can");
        assert!(!command.uid(65534).gid(65534).stderr(std::process::Stdio::null()).status().unwrap().success());
    }
}
