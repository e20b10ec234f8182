//! Sampler that looks at a program and all its children from outside, and keeps samples.
//!
//! The processor sets the accessed bit of a page that is used. `Referenced` in `smaps` counts the
//! bits of a mapping, and `clear_refs` clears all. Setting a bit again costs the program some time,
//! and much in a virtual machine. So bits are cleared only as often as [`COST_SHARE`] allows, by
//! the cost measured here. Counting them costs the program nothing but a lock.

use super::proc::{self, ProcessCounts, SmapsEntry};
use farfield_core::policy::profile::{Area, AreaKind, AreaSample, Cost, Observation, Sample};
use farfield_os::process;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Share of the program's processor time that clearing bits may cost.
const COST_SHARE: f64 = 0.02;
/// Share of processor time that the first clearing may cost. All memory is new then, and it is not
/// known yet how much of it is used again.
const FIRST_COST_SHARE: f64 = 0.2;
/// Share of one processor that looking may take.
const LOOK_SHARE: f64 = 0.05;
/// Longest time between two looks, and longest epoch.
const LOOK_MAX: Duration = Duration::from_secs(1);
const EPOCH_MAX: Duration = Duration::from_secs(60);
/// Fewest looks in an epoch.
const LOOKS_MIN: u32 = 3;
/// Interval of the first looks. It is short because the program may be a short one.
const FIRST_LOOK: Duration = Duration::from_millis(10);
/// Mappings with less resident memory get no area of their own.
const AREA_BYTES_MIN: u64 = 1 << 20;
/// Number of looks after which the interval doubles, again and again.
const LOOKS_HALVE: usize = 1000;
/// Memory with which the cost of a first use is measured.
const TRIAL_BYTES: usize = 16 << 20;
const PAGE_BYTES: u64 = 4096;

/// Sampler of a program and its children.
pub(super) struct Sampler {
    interval: Duration,
    started: Instant,
    /// Time at which bits were cleared, and the processor time of the program then.
    cleared: Instant,
    cleared_cpu_ms: u64,
    epoch: u32,
    /// Looks since bits were cleared.
    looks: u32,
    first_use_ns: u64,
    first_uses: u64,
    busy: Duration,
    text: String,
    areas: Vec<Area>,
    area_of: BTreeMap<(u32, u64), u32>,
    counts: BTreeMap<u32, ProcessCounts>,
    threads_max: u32,
    samples: Vec<Sample>,
}

impl Sampler {
    pub(super) fn new(interval: Duration) -> Sampler {
        let now = Instant::now();
        Sampler {
            interval,
            started: now,
            cleared: now,
            cleared_cpu_ms: 0,
            epoch: 0,
            looks: 0,
            first_use_ns: first_use_ns(),
            first_uses: 0,
            busy: Duration::ZERO,
            text: String::new(),
            areas: Vec::new(),
            area_of: BTreeMap::new(),
            counts: BTreeMap::new(),
            threads_max: 0,
            samples: Vec::new(),
        }
    }

    /// Takes a sample. Returns the time to wait until the next look.
    pub(super) fn take_sample(&mut self) -> Duration {
        let (begin, busy_ns) = (Instant::now(), process::thread_cpu_ns());
        if self.counts.is_empty() {
            // The program has just been started.
            (self.started, self.cleared) = (begin, begin);
        }
        let processes = proc::descendants();
        let sample = self.sample(&processes, begin);
        let used = sample.anonymous_used_bytes + sample.file_used_bytes;
        let seen = !sample.areas.is_empty() || sample.threads > 0;
        if seen {
            self.samples.push(sample);
            self.looks += 1;
        }
        if self.looks >= LOOKS_MIN && self.is_worth_clearing(used) {
            self.clear(&processes, used);
        }
        // Processor time is measured, because waiting for a busy processor costs no one anything.
        let took = Duration::from_nanos(process::thread_cpu_ns() - busy_ns);
        self.busy += took;
        self.next_look(took)
    }

    /// Checks whether the program has worked so long since that the cost of clearing bits does not
    /// matter.
    fn is_worth_clearing(&self, used: u64) -> bool {
        let share = if self.epoch == 0 { FIRST_COST_SHARE } else { COST_SHARE };
        let cost = Duration::from_nanos(used / PAGE_BYTES * self.first_use_ns);
        let worked = Duration::from_millis(self.cpu_ms().saturating_sub(self.cleared_cpu_ms));
        worked >= cost.div_f64(share) || self.cleared.elapsed() >= EPOCH_MAX
    }

    fn next_look(&self, took: Duration) -> Duration {
        if self.samples.len() < LOOKS_MIN as usize {
            return FIRST_LOOK.min(self.interval);
        }
        let since = self.cleared.elapsed();
        let rarer = 1 << (self.samples.len() / LOOKS_HALVE).min(10);
        let wait = (since / 4).clamp(self.interval, LOOK_MAX.max(self.interval)) * rarer;
        wait.max(took.div_f64(LOOK_SHARE))
    }

    fn clear(&mut self, processes: &[u32], used: u64) {
        for &pid in processes {
            // The process may be gone.
            let _ = proc::clear_used(pid);
        }
        // Pages used in the first epoch were new.
        self.first_uses += if self.epoch > 0 { used / PAGE_BYTES } else { 0 };
        self.epoch += 1;
        self.looks = 0;
        self.cleared = Instant::now();
        self.cleared_cpu_ms = self.cpu_ms();
    }

    fn sample(&mut self, processes: &[u32], now: Instant) -> Sample {
        let mut sample = Sample {
            at_ms: (now - self.started).as_millis() as u64,
            epoch: self.epoch,
            since_ms: (now - self.cleared).as_millis() as u64,
            ..Sample::default()
        };
        let mut text = std::mem::take(&mut self.text);
        for &pid in processes {
            let (Ok(counts), Ok(mappings)) = (proc::counts(pid), proc::mappings(pid, &mut text)) else {
                continue; // It has ended, or is no longer ours to look at.
            };
            sample.threads += counts.threads;
            self.counts.insert(pid, counts);
            for mapping in &mappings {
                self.add(pid, mapping, &mut sample);
            }
        }
        self.text = text;
        self.threads_max = self.threads_max.max(sample.threads);
        // Processes that have ended count with their last values.
        sample.faults = self.counts.values().map(|counts| counts.faults).sum();
        sample.cpu_ms = self.cpu_ms();
        sample
    }

    fn add(&mut self, pid: u32, mapping: &SmapsEntry, sample: &mut Sample) {
        let anonymous = mapping.anonymous_bytes.min(mapping.resident_bytes);
        let file = mapping.resident_bytes - anonymous;
        // In a mapping that has both kinds of pages, the bits are not told apart.
        let anonymous_used = match mapping.kind {
            AreaKind::Anonymous => mapping.used_bytes,
            _ => mapping.used_bytes.min(anonymous),
        };
        sample.anonymous_bytes += anonymous;
        sample.file_bytes += file;
        sample.anonymous_used_bytes += anonymous_used;
        sample.file_used_bytes += mapping.used_bytes - anonymous_used;
        sample.huge_bytes += mapping.huge_bytes;
        let known = self.area_of.get(&(pid, mapping.start)).copied();
        if known.is_none() && mapping.resident_bytes < AREA_BYTES_MIN {
            return;
        }
        let area = known.unwrap_or_else(|| {
            let (start, end, kind, name) = (mapping.start, mapping.end, mapping.kind, mapping.name.clone());
            self.areas.push(Area { process: pid, start, end, kind, name });
            self.area_of.insert((pid, start), self.areas.len() as u32 - 1);
            self.areas.len() as u32 - 1
        });
        let end = &mut self.areas[area as usize].end;
        *end = mapping.end.max(*end);
        let (resident_bytes, used_bytes) = (mapping.resident_bytes, mapping.used_bytes);
        sample.areas.push(AreaSample { area, resident_bytes, used_bytes });
    }

    fn cpu_ms(&self) -> u64 {
        let ticks: u64 = self.counts.values().map(|counts| counts.cpu_ticks).sum();
        // The kernel reports ticks of a hundredth of a second to programs, whatever it uses itself.
        ticks * 10
    }

    /// Returns the last sample.
    pub(super) fn last(&self) -> Option<&Sample> {
        self.samples.last()
    }

    /// Returns all observations of a program that ran for `wall`.
    pub(super) fn finish(self, wall: Duration) -> Observation {
        let cpu_ms = self.cpu_ms();
        let cost = self.first_uses * self.first_use_ns;
        Observation {
            wall_ms: wall.as_millis() as u64,
            undisturbed_ms: 0,
            cpu_ms,
            processors: std::thread::available_parallelism().map_or(1, |number| number.get() as u32),
            processes: self.counts.len() as u32,
            threads_max: self.threads_max,
            read_bytes: self.counts.values().map(|counts| counts.read_bytes).sum(),
            written_bytes: self.counts.values().map(|counts| counts.written_bytes).sum(),
            cost: Cost {
                first_use_ns: self.first_use_ns,
                sampler_ms: self.busy.as_millis() as u64,
                first_uses: self.first_uses,
                share: cost as f64 / 1e6 / (cpu_ms.max(1) as f64),
            },
            areas: self.areas,
            samples: self.samples,
        }
    }
}

/// Measures the cost of the first use of a page after its bit was cleared, on memory of this
/// process.
fn first_use_ns() -> u64 {
    let memory = vec![1u8; TRIAL_BYTES];
    let pass = || {
        let begin = Instant::now();
        for page in memory.chunks(PAGE_BYTES as usize) {
            std::hint::black_box(page[0]);
        }
        begin.elapsed()
    };
    let warm = pass().min(pass());
    match proc::clear_used(std::process::id()) {
        Ok(()) => pass().saturating_sub(warm).as_nanos() as u64 / (TRIAL_BYTES as u64 / PAGE_BYTES),
        // Then it will not be possible for the program either.
        Err(_) => 0,
    }
}

#[cfg(test)]
mod tests {
    //! Danger: memory of a program that is not seen, or seen twice.
    use super::*;

    fn mapping(start: u64, kind: AreaKind, sizes: [u64; 3]) -> SmapsEntry {
        let [resident_bytes, used_bytes, anonymous_bytes] = sizes.map(|mib| mib << 20);
        SmapsEntry {
            start,
            end: start + resident_bytes,
            kind,
            name: String::new(),
            resident_bytes,
            used_bytes,
            anonymous_bytes,
            huge_bytes: 0,
        }
    }

    #[test]
    fn every_byte_is_of_one_kind() {
        let mut sampler = Sampler::new(Duration::from_millis(100));
        let mut sample = Sample::default();
        sampler.add(1, &mapping(0, AreaKind::Anonymous, [100, 60, 100]), &mut sample);
        sampler.add(1, &mapping(1 << 30, AreaKind::File, [50, 20, 5]), &mut sample);
        sampler.add(2, &mapping(0, AreaKind::Code, [10, 10, 0]), &mut sample);
        sampler.add(2, &mapping(1 << 30, AreaKind::Anonymous, [0, 0, 0]), &mut sample);
        let used = (sample.anonymous_used_bytes >> 20, sample.file_used_bytes >> 20);
        assert_eq!((sample.anonymous_bytes >> 20, sample.file_bytes >> 20, used), (105, 55, (65, 25)));
        assert_eq!((sampler.areas.len(), sample.areas.len()), (3, 3), "what is small has no place of its own");
    }

    #[test]
    fn a_mapping_that_grows_is_the_same() {
        let mut sampler = Sampler::new(Duration::from_millis(100));
        for mib in [10, 30, 20] {
            sampler.add(1, &mapping(0, AreaKind::Anonymous, [mib, 0, mib]), &mut Sample::default());
        }
        assert_eq!(sampler.areas.iter().map(|area| area.end >> 20).collect::<Vec<_>>(), [30]);
    }

    #[test]
    fn looks_become_rarer_and_never_take_more_than_their_share() {
        let mut sampler = Sampler::new(Duration::from_millis(100));
        assert_eq!(sampler.next_look(Duration::ZERO), FIRST_LOOK);
        sampler.samples = vec![Sample::default(); 10];
        assert_eq!(sampler.next_look(Duration::from_millis(1)), Duration::from_millis(100));
        assert_eq!(sampler.next_look(Duration::from_millis(50)), Duration::from_secs(1));
        sampler.samples = vec![Sample::default(); 2 * LOOKS_HALVE];
        assert_eq!(sampler.next_look(Duration::ZERO), Duration::from_millis(400));
    }

    #[test]
    fn bits_are_cleared_when_the_program_has_worked_for_them() {
        let mut sampler = Sampler::new(Duration::from_millis(100));
        // A thousand pages: one millisecond.
        let used = 1000 * PAGE_BYTES;
        (sampler.first_use_ns, sampler.epoch, sampler.cleared_cpu_ms) = (1000, 1, 500);
        let mut check = |ticks: u64, expected: bool| {
            sampler.counts.insert(1, ProcessCounts { cpu_ticks: ticks, ..ProcessCounts::default() });
            assert_eq!(sampler.is_worth_clearing(used), expected, "{ticks}");
        };
        check(50, false);
        check(54, false);
        check(55, true);
        sampler.cleared = Instant::now().checked_sub(EPOCH_MAX).unwrap();
        sampler.counts.clear();
        assert!(sampler.is_worth_clearing(used), "one that rests is asked now and then");
    }

    #[test]
    fn a_child_is_seen_with_what_it_has_and_stays_when_it_has_ended() {
        let mut sampler = Sampler::new(Duration::from_millis(1));
        let mut child = std::process::Command::new("sh")
            .args(["-c", "x=$(head -c 4194304 /dev/zero | tr '\\0' x); read line"])
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while sampler.last().is_none_or(|sample| sample.anonymous_bytes < 4 << 20) {
            assert!(Instant::now() < deadline);
            sampler.take_sample();
        }
        drop(child.stdin.take());
        child.wait().unwrap();
        sampler.take_sample();
        let observation = sampler.finish(Duration::from_secs(1));
        assert!(observation.processes >= 1 && observation.anonymous_peak_bytes() >= 4 << 20);
        assert!(observation.samples.windows(2).all(|pair| pair[0].at_ms <= pair[1].at_ms));
        assert!(observation.samples.windows(2).all(|pair| pair[0].faults <= pair[1].faults));
        assert!(observation.areas.iter().any(|area| area.kind == AreaKind::Anonymous));
    }
}
