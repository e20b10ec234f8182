//! Heaps of programs that use the library, if they have a name: read from the notices that they
//! publish.

use super::{age, command_line, cut, part, per_second, percent, printable, write_parts};
use crate::notice::{FoundNotice, Notice};
use farfield_core::notice;
use farfield_pager::runner::{ByteSize, CompactCount, Latency, processes};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

/// A heap that is watched.
pub(super) struct HeapView {
    command: String,
    found: FoundNotice,
    /// Notice before that one, from which rates are computed.
    before: Option<Notice>,
}

impl HeapView {
    /// Opens the heaps of one process.
    pub(super) fn find(pid: u32) -> Vec<HeapView> {
        let found = FoundNotice::find(pid, notice::OF_HEAP).into_iter();
        found.map(|found| HeapView { command: command_line(pid), found, before: None }).collect()
    }

    /// Opens the heaps of all processes that this user may inspect.
    pub(super) fn find_all() -> Vec<HeapView> {
        processes().flat_map(HeapView::find).collect()
    }

    /// Returns what tells a heap from every other one.
    pub(super) fn key(&self) -> (u32, u64) {
        (self.found.pid, self.found.inode())
    }

    pub(super) fn read(&mut self) -> HeapRow {
        let pid = self.found.pid;
        let now = self.found.read();
        let alive = now.is_some();
        if let Some(now) = now.filter(|now| now.number("at_ns") > self.found.notice.number("at_ns")) {
            self.before = Some(std::mem::replace(&mut self.found.notice, now));
        }
        let notice = &self.found.notice;
        let number = |name: &str| notice.number(name);
        let rate = |name: &str| match &self.before {
            // The heap is hardly younger than its process.
            None => age(pid).map_or(0.0, |age| per_second(number(name), age)),
            Some(before) => {
                let since = Duration::from_nanos(number("at_ns").saturating_sub(before.number("at_ns")));
                per_second(number(name).saturating_sub(before.number(name)), since)
            }
        };
        let text = |name: &str| printable(notice.text(name));
        let access_rates = notice.numbers("access_rates");
        HeapRow {
            pid,
            command: self.command.clone(),
            name: text("name"),
            plane: text("plane"),
            alive,
            misses_per_s: rate("misses"),
            fetched_bytes_per_s: rate("fetched_bytes"),
            evicting_share: rate("evicting_ns") / 1e9,
            page_path_share: part(number("pages_to_come_whole"), number("value_pages")),
            whole_share: part(number("left_to_come_whole"), access_rates.iter().sum()),
            amplification: part(number("fetched_bytes"), number("used_bytes")),
            prefetch_accuracy: part(number("prefetches_used"), number("prefetches_used") + number("prefetches_unused")),
            access_rates,
            pauses: notice.numbers("pauses"),
            gc_pauses: notice.numbers("gc_pause_counts"),
            counters: notice.counters(),
        }
    }
}

#[derive(serde::Serialize, serde::Deserialize, Debug)]
pub(super) struct HeapRow {
    pub(super) pid: u32,
    pub(super) command: String,
    pub(super) name: String,
    pub(super) plane: String,
    /// Whether the heap still exists.
    pub(super) alive: bool,
    pub(super) misses_per_s: f64,
    pub(super) fetched_bytes_per_s: f64,
    /// Share of one processor that eviction takes.
    evicting_share: f64,
    /// Share of the evicted pages of small values that will be fetched as a whole, since the start.
    whole_share: Option<f64>,
    /// Share of the pages of small values, near or far, that are fetched as a whole when they are
    /// far.
    page_path_share: Option<f64>,
    /// Bytes read per byte that was used in pages of small values, since the start.
    amplification: Option<f64>,
    prefetch_accuracy: Option<f64>,
    pub(super) access_rates: Vec<u64>,
    pauses: Vec<u64>,
    /// Stops of the mutators of a collected heap; empty if the heap has none.
    gc_pauses: Vec<u64>,
    pub(super) counters: BTreeMap<String, u64>,
}

/// Renders a heap for people.
pub(super) fn render(heap: &HeapRow, text: &mut String) {
    let number = |name: &str| heap.counters.get(name).copied().unwrap_or(0);
    let (bytes, count) = (|name: &str| ByteSize(number(name)), |name: &str| CompactCount(number(name)));
    let ended = if heap.alive { "" } else { "  (ended)" };
    let line = format!("heap {}{ended}  process {}  {}", heap.name, heap.pid, heap.command);
    // Writing into a string cannot fail.
    let _ = writeln!(text, "{}", cut(&line));
    let of_values = match number("object_misses") {
        0 => String::new(),
        misses => format!("{} of values alone", CompactCount(misses)),
    };
    let mut parts = vec![
        format!(
            "near {} of {} (tables {}, pinned {})",
            bytes("near_bytes"),
            bytes("near_limit_bytes"),
            bytes("table_bytes"),
            bytes("pinned_bytes"),
        ),
        format!("{} plane", heap.plane),
        format!("{} misses ({}/s)", count("misses"), CompactCount(heap.misses_per_s as u64)),
        of_values,
        format!("{} pages came whole", count("whole_pages")),
        format!(
            "{} fetched ({}/s{})",
            bytes("fetched_bytes"),
            ByteSize(heap.fetched_bytes_per_s as u64),
            heap.amplification.map_or(String::new(), |factor| format!(", {factor:.1} times what was used")),
        ),
        format!("prefetch {}", percent(heap.prefetch_accuracy)),
        format!(
            "{} pages out ({} clean, {} dead) took {} ({} of a processor)",
            CompactCount(number("written_pages") + number("clean_pages") + number("dead_pages")),
            count("clean_pages"),
            count("dead_pages"),
            Latency(Some(number("evicting_ns"))),
            percent(Some(heap.evicting_share)),
        ),
        format!("{} waits for room", count("throttled")),
    ];
    if number("held_by") != 0 {
        let held = Latency(Some(number("held_back_ns")));
        parts.push(format!("too little room for {held}: a scope of thread {} does not end", number("held_by")));
    }
    if heap.page_path_share.is_some() && heap.plane == "hybrid" {
        let (pages, whole) = (count("value_pages"), percent(heap.page_path_share));
        parts.push(format!("{pages} pages of small values, near or far, of which {whole} come whole"));
    }
    if heap.whole_share.is_some() {
        let rates = heap.access_rates.iter().map(|pages| CompactCount(*pages).to_string());
        parts.push("used of pages out, by tenths:".to_owned());
        parts.push(rates.collect::<Vec<_>>().join(" "));
        parts.push(format!("come whole {}", percent(heap.whole_share)));
    }
    if number("gc_limit_bytes") != 0 {
        let time = |name: &str| Latency(Some(number(name)));
        parts.push(format!(
            "collected {} of {} ({} live)",
            bytes("gc_used_bytes"),
            bytes("gc_limit_bytes"),
            bytes("gc_live_bytes"),
        ));
        parts.push(format!("{} collections, the last took {}", count("gc_collections"), time("gc_last_collection_ns")));
        parts.push(format!("{} stops of up to {}", count("gc_pauses"), time("gc_longest_pause_ns")));
        if number("gc_stalls") != 0 {
            let (stalls, longest) = (count("gc_stalls"), time("gc_longest_stall_ns"));
            parts.push(format!("{stalls} waits for collections of up to {longest}: a higher limit makes them rarer"));
        }
    }
    write_parts(text, &parts);
}
