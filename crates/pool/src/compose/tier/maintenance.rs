//! Background maintenance of a tiered pool: old pages move to the next tier, and copies that do not
//! count are given back.

use super::lane::{SPLITS, TierLane, TierSplit, TierSplitKind};
use super::table::{Bid, TierTable};
use crate::{Buffer, Op, PoolError};
use core::time::Duration;
use farfield_core::PageId;
use farfield_core::policy::tier_admission::{TierClockAction, clock_action};
use farfield_core::tier_word::TierWord;

/// Number of pages that are moved together, and of pages that are looked at in one go.
const MOVE_PAGES: u64 = 64;
const LOOK: u64 = 4096;
/// Pause after a failure.
const REST: Duration = Duration::from_millis(100);
/// Pause after `VAIN_ROUNDS` rounds in vain. In the first of them pages are spared that were
/// written since the round before.
const SHORT_REST: Duration = Duration::from_millis(5);
const VAIN_ROUNDS: u32 = 2;
/// Number of steps of a lane for each operation of its owner that changes pages, for a move and
/// what it leaves behind; and most steps that it has before it.
const STEPS: u32 = 2;
const STEPS_MAX: u32 = 8;

/// Background maintenance that one lane does besides its operations.
pub(super) struct TierMaintenance {
    /// Number of steps that may begin while the owner changes pages; `None` for no limit.
    steps: Option<u32>,
    /// Free buffers; there is one for each step at a time.
    buffers: Vec<Buffer>,
    most: usize,
    busy: usize,
    /// Position of the clock hand of each tier, and position of the search for copies to give back.
    hands: [u64; TierWord::TIERS_MAX],
    sweeps_from: u64,
    /// Number of rounds that found nothing to do.
    vain_rounds: u32,
    is_stopped: bool,
}

impl TierMaintenance {
    pub(super) fn of_owner() -> TierMaintenance {
        TierMaintenance { steps: Some(0), ..TierMaintenance::of_thread(1) }
    }

    pub(super) fn of_thread(most: usize) -> TierMaintenance {
        TierMaintenance {
            steps: None,
            buffers: (0..most).map(|_| Buffer::new(MOVE_PAGES as usize)).collect(),
            most,
            busy: 0,
            hands: [0; TierWord::TIERS_MAX],
            sweeps_from: 0,
            vain_rounds: 0,
            is_stopped: false,
        }
    }

    /// Grants steps, because the owner changes pages.
    pub(super) fn on_change(&mut self) {
        self.steps = self.steps.map(|steps| (steps + STEPS).min(STEPS_MAX));
    }

    pub(super) fn is_busy(&self) -> bool {
        self.busy > 0
    }

    /// Starts nothing more; steps that are under way end.
    pub(super) fn stop(&mut self) {
        self.is_stopped = true;
    }

    pub(super) fn go_on(&mut self) {
        self.is_stopped = false;
    }

    /// Checks whether a step may begin.
    fn is_free(&self, changes: usize) -> bool {
        let is_allowed = self.steps.is_none_or(|steps| steps > 0 && changes > 0);
        is_allowed && self.busy < self.most && !self.is_stopped
    }

    pub(super) fn on_sent(&mut self) {
        self.busy += 1;
    }

    pub(super) fn on_ended(&mut self) {
        self.busy -= 1;
    }

    fn find(&mut self, table: &TierTable) -> Option<MaintenanceStep> {
        if table.is_resting() {
            return None;
        }
        let found = if table.has_garbage() {
            self.find_garbage(table)
        } else {
            (0..table.members.len()).find_map(|from| self.find_to_move(table, from, table.move_to(from)?))
        };
        if found.is_some() {
            self.vain_rounds = 0;
        } else if self.vain_rounds >= VAIN_ROUNDS {
            self.vain_rounds = 0;
            table.rest(SHORT_REST);
        }
        found
    }

    fn find_garbage(&mut self, table: &TierTable) -> Option<MaintenanceStep> {
        for _ in 0..LOOK {
            let first = table.next_written(self.sweeps_from);
            if first == table.pages {
                self.sweeps_from = 0;
                self.vain_rounds += 1;
                return None;
            }
            if let Some(tier) = table.word(first).garbage().iter().next() {
                // More than one tier may have such a copy.
                self.sweeps_from = first;
                return Some(MaintenanceStep::Sweep { first, tier });
            }
            self.sweeps_from = first + 1;
        }
        None
    }

    /// Moves the clock hand of a tier on to pages that were not written since it was there last,
    /// and claims them (CLOCK).
    fn find_to_move(&mut self, table: &TierTable, from: usize, to: usize) -> Option<MaintenanceStep> {
        for _ in 0..LOOK {
            let first = table.next_written(self.hands[from]);
            if first == table.pages {
                self.hands[from] = 0;
                self.vain_rounds += 1;
                return None;
            }
            self.hands[from] = first + 1;
            match clock_action(table.word(first), from) {
                TierClockAction::Pass => {}
                TierClockAction::Spare(_) => table.age(first),
                TierClockAction::Leave => {
                    let (count, bid) = table.claim_move(first, MOVE_PAGES, from, to);
                    if count > 0 {
                        self.hands[from] = first + count;
                        return Some(MaintenanceStep::Move { first, count, from, to, bid });
                    }
                }
            }
        }
        None
    }
}

/// Maintenance step that comes next.
enum MaintenanceStep {
    Sweep { first: u64, tier: usize },
    Move { first: u64, count: u64, from: usize, to: usize, bid: Bid },
}

impl TierLane {
    /// Begins the next step, if there is one.
    pub(super) fn begin_maintenance(&mut self) {
        let Some(maintenance) = self.maintenance.as_mut().filter(|maintenance| maintenance.is_free(self.changes))
        else {
            return;
        };
        if self.free_splits.len() < SPLITS / 2 {
            return;
        }
        let Some(step) = maintenance.find(&self.table) else { return };
        maintenance.steps = maintenance.steps.map(|steps| steps - 1);
        match step {
            MaintenanceStep::Sweep { first, tier } => {
                self.sweep(first, self.table.pages, tier, None);
            }
            MaintenanceStep::Move { first, count, from, to, bid } => match maintenance.buffers.pop() {
                Some(mut buffer) if self.members[from].is_some() => {
                    buffer.set_pages(count as usize);
                    let split = TierSplit { kind: TierSplitKind::MoveRead { to, bid }, tier: from, page: first, count };
                    self.send(split, Op::Read { page: PageId(first), buffer });
                }
                buffer => {
                    maintenance.buffers.extend(buffer);
                    self.table.finish_move(first, count, to, false);
                    self.table.end_leaving(from, count);
                }
            },
        }
    }

    /// Writes pages that shall move, now that they have been read.
    pub(super) fn move_read(
        &mut self,
        split: TierSplit,
        (to, bid): (usize, Bid),
        result: Result<(), PoolError>,
        buffer: Buffer,
    ) {
        if result.is_ok() && self.members[to].is_some() {
            let task = TierSplitKind::MoveWrite { from: split.tier, bid };
            return self
                .send(TierSplit { kind: task, tier: to, ..split }, Op::Write { page: PageId(split.page), buffer });
        }
        self.table.finish_move(split.page, split.count, to, false);
        self.table.end_leaving(split.tier, split.count);
        self.give_back(buffer, true);
    }

    /// Ends a move whose pages have been written.
    pub(super) fn move_ended(
        &mut self,
        split: TierSplit,
        (from, bid): (usize, Bid),
        result: Result<(), PoolError>,
        buffer: Buffer,
    ) {
        let TierSplit { tier, page, count, .. } = split;
        match result {
            // The write may still arrive, so no other write goes there any more.
            Err(PoolError::TimedOut { .. }) => {}
            Err(error) => {
                if matches!(error, PoolError::PoolFull { .. }) {
                    self.table.set_full(tier, bid);
                }
                self.table.finish_move(page, count, tier, false);
            }
            Ok(()) => {
                self.table.took(tier, bid);
                self.table.finish_move(page, count, tier, true);
            }
        }
        self.table.end_leaving(from, count);
        self.give_back(buffer, result.is_err());
        if let Some(maintenance) = &mut self.maintenance {
            maintenance.sweeps_from = page;
        }
    }

    fn give_back(&mut self, buffer: Buffer, rests: bool) {
        if let Some(maintenance) = &mut self.maintenance {
            maintenance.buffers.push(buffer);
        }
        if rests {
            self.table.rest(REST);
        }
    }

    /// Ends the return of copies.
    pub(super) fn sweep_ended(
        &mut self,
        TierSplit { tier, page, count, .. }: TierSplit,
        result: Result<(), PoolError>,
    ) {
        match result {
            Ok(()) | Err(PoolError::ServerGone { .. }) => self.table.finish_sweep(page, count, tier, true),
            // The discard may still arrive, on top of what would be written there next.
            Err(PoolError::TimedOut { .. }) => {}
            Err(_) => {
                self.table.finish_sweep(page, count, tier, false);
                self.table.rest(REST);
            }
        }
        self.table.end_leaving(tier, count);
    }
}
