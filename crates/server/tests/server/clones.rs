//! Guards against pages that leak between a region and its clones, over the network and in mapped memory: a family of
//! regions does random things and must agree with a model of each.

use crate::common::*;
use farfield_core::PageId;
use farfield_pool::{Backend, Buffer, Completion, Lane, LaneRequest, Op, PoolBuilder, Priority};
use farfield_server::Config;
use fastrand::Rng;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

const PAGES: u64 = 300;

struct Relative {
    backend: Arc<dyn Backend>,
    lane: Box<dyn Lane>,
    model: BTreeMap<u64, u64>,
}

impl Relative {
    fn new(backend: Arc<dyn Backend>, model: BTreeMap<u64, u64>) -> Relative {
        let lane = backend.open_lane().unwrap();
        Relative { backend, lane, model }
    }

    fn perform(&mut self, op: Op) -> Option<Buffer> {
        let request = LaneRequest { tag: 1, priority: Priority::Demand, deadline: PATIENCE, op };
        self.lane.submit(request).expect("an empty lane has room");
        let mut done: Vec<Completion> = Vec::with_capacity(1);
        while self.lane.poll(&mut done) == 0 {
            self.lane.wait(Duration::from_millis(100));
        }
        let completion = done.remove(0);
        completion.result.unwrap();
        completion.buffer
    }

    fn write(&mut self, first: u64, values: &[u64]) {
        let mut buffer = Buffer::new(values.len());
        for (index, value) in values.iter().enumerate() {
            buffer.page_mut(index).copy_from_slice(&page_of(*value));
        }
        buffer.seal();
        self.perform(Op::Write { page: PageId(first), buffer });
        self.model.extend((first..).zip(values.iter().copied()));
    }

    fn discard(&mut self, first: u64, count: u64) {
        self.perform(Op::Discard { page: PageId(first), count });
        self.model.retain(|page, _| !(first..first + count).contains(page));
    }

    fn check(&mut self, first: u64, count: u64, context: &dyn std::fmt::Debug) {
        let buffer = self.perform(Op::Read { page: PageId(first), buffer: Buffer::new(count as usize) }).unwrap();
        for index in 0..count {
            let expected = page_of(self.model.get(&(first + index)).copied().unwrap_or(0));
            assert!(buffer.page(index as usize) == expected, "page {} is wrong, {context:?}", first + index);
        }
        if let Some(mapped) = self.backend.mapped() {
            for page in first..first + count {
                let seen = mapped.page(PageId(page)).map(|address| {
                    // SAFETY: valid until the region is written next, and aligned because pages are.
                    #[allow(clippy::cast_ptr_alignment)]
                    unsafe {
                        address.cast::<u64>().read_volatile()
                    }
                });
                assert_eq!(seen, self.model.get(&page).copied(), "mapped page {page}, {context:?}");
            }
        }
    }
}

fn a_family_agrees_with_its_models(pick: fn(&farfield_server::Server) -> &str) {
    let server = serve(Config { sweep_every: Duration::from_millis(10), lease: Duration::ZERO, ..config() });
    let builder = PoolBuilder::new().url(pick(&server)).pages(PAGES).client_name("family");
    for seed in [3u64, 0xfa1, 0xbeef_0001] {
        let mut dice = Rng::with_seed(seed | 1 << 40);
        let mut family = vec![Relative::new(builder.open().unwrap(), BTreeMap::new())];
        for step in 0..700u64 {
            let alive = family.len();
            let at = dice.usize(..alive);
            let first = dice.u64(..PAGES);
            let count = 1 + dice.u64(..(PAGES - first).min(30));
            let member = &mut family[at];
            match dice.u64(..16) {
                0..=7 => {
                    let values: Vec<u64> = (0..count).map(|index| step << 16 | index << 1 | 1).collect();
                    member.write(first, &values);
                }
                8..=11 => member.discard(first, count),
                12..=13 if alive < 4 => {
                    let ticket = member.backend.clone_region().unwrap();
                    let model = member.model.clone();
                    family.push(Relative::new(builder.claim(&ticket).unwrap(), model));
                }
                14 if alive > 1 => drop(family.swap_remove(at)),
                _ => {}
            }
            let at = dice.usize(..family.len());
            let first = dice.u64(..PAGES);
            let count = 1 + dice.u64(..(PAGES - first).min(60));
            family[at].check(first, count, &(seed, step));
        }
        for member in &mut family {
            member.check(0, PAGES / 2, &seed);
            member.check(PAGES / 2, PAGES - PAGES / 2, &seed);
        }
        // With one left, the server keeps what that one holds, and in the end nothing.
        family.truncate(1);
        let held = family[0].model.len() as u64;
        eventually("only the last one's pages are kept", || {
            let stat = server.stat();
            (stat.sessions, stat.used_pages) == (1, held)
        });
        drop(family);
        eventually("nothing is kept", || {
            let stat = server.stat();
            (stat.sessions, stat.used_pages, stat.reserved_pages) == (0, 0, 0)
        });
    }
}

#[test]
fn clones_over_tcp_agree_with_their_models() {
    a_family_agrees_with_its_models(tcp);
}

#[test]
fn clones_in_mapped_memory_agree_with_their_models() {
    a_family_agrees_with_its_models(unix);
}
