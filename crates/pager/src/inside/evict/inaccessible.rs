//! Eviction of pages that the program may not access (`PROT_NONE`): no pipe can hold them.
//!
//! These pages are copied through `/proc/self/mem`, which asks for no protection, and then
//! unmapped. No write is lost: nobody can write them before an `mprotect`, which needs the lock of
//! the address space, which is held here.

use super::{Victim, VictimCounts, WindowEvictor};
use crate::inside::lock::Guard;
use crate::inside::runtime::{Armed, Runtime};
use crate::space::Space;
use crate::window;
use core::sync::atomic::Ordering;
use farfield_core::PageId;
use farfield_os::memory;

impl WindowEvictor {
    /// Keeps as victims, behind the first `held` ones, those that nobody may access; all others go
    /// back to Near. The first `held` victims have left already. As long as the returned guard of
    /// the space is held the kept victims stay inaccessible.
    pub(super) fn keep_inaccessible<'a>(&mut self, runtime: &'a Runtime, held: usize) -> Option<Guard<'a, Space>> {
        if held == self.count {
            return None;
        }
        let space = runtime.space.try_lock();
        let is_inaccessible = |victim: &Victim| {
            let stretch = space.as_ref().and_then(|space| space.stretch(victim.page.0));
            stretch.is_some_and(|(_, prot)| prot == libc::PROT_NONE)
        };
        let mut count = 0;
        for index in held..self.count {
            let victim = self.victims[index];
            if is_inaccessible(&victim) {
                self.victims[held + count] = victim;
                count += 1;
            } else {
                stay(runtime, victim.page);
            }
        }
        self.count = held + count;
        space.filter(|_| count > 0)
    }

    /// Evicts the victims from `first` on, as copies, with the space held. Returns how many left.
    pub(super) fn leave_inaccessible(
        &mut self,
        runtime: &Runtime,
        armed: &Armed,
        first: usize,
        _space: Guard<'_, Space>,
    ) -> usize {
        let range = first..self.count;
        self.victims[range.clone()].sort_unstable_by_key(|victim| victim.page);
        let now = runtime.evictions.fetch_add(range.len() as u32, Ordering::Relaxed);
        let VictimCounts { pages: left, .. } =
            self.read_and_write(runtime, armed, range, now, |page, into| copy_and_unmap(armed, page, into));
        // The rest stays: this happens with a kernel that was told to respect protections even
        // here.
        self.victims[first + left..self.count].iter().for_each(|victim| stay(runtime, victim.page));
        left
    }
}

/// Makes a victim a near page again.
pub(super) fn stay(runtime: &Runtime, page: PageId) {
    runtime.table().update(page, |word| Some(word.cancel_eviction()));
    runtime.queue.lock().push(page, |_| false);
}

fn copy_and_unmap(armed: &Armed, first: PageId, into: &mut [u8]) -> bool {
    let address = window::address_of(first);
    armed.own_memory.as_ref().is_some_and(|file| file.read_exact(address, into).is_ok())
        // SAFETY: the content is copied, and nobody can have changed it since.
        && unsafe { memory::madvise(address, into.len(), libc::MADV_DONTNEED) }.is_ok()
}
