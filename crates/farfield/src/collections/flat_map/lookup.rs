//! Look-ups in far pages: the page is brought near, or the memory server looks the key up.
//!
//! While the map is borrowed nobody changes its pages. So a page that was far at some moment during
//! that time has its current bytes at the server, even if it is brought near meanwhile.

use super::FarFlatMap;
use crate::error::FarError;
use crate::heap::{HeapInner, Scope};
use crate::offload::OffloadTarget;
use bytemuck::{Pod, bytes_of, pod_read_unaligned as from_bytes};
use core::hash::BuildHasher;
use farfield_core::policy::call_placement::Side;
use farfield_wic::Where;
use farfield_wic::access::Bytes;
use farfield_wic::lookup::{Lookup, LookupBatch, LookupOutcome, LookupReply};
use std::collections::BTreeMap;
use std::time::Instant;

/// Most keys of one call.
const CALL_KEYS: usize = 512;
/// Bytes of an argument or of an answer that keys or values may take; the limit is 64 KiB.
const CALL_BYTES: usize = 60 << 10;
/// Bytes of an argument for each key beside the key itself.
const KEY_HEAD_BYTES: usize = 16;
/// Pages that are requested together when keys are looked up here.
const PAGES_AHEAD: usize = 64;

/// A key that is looked up, with the first page of its bucket.
#[derive(Clone, Copy)]
struct Query<'k, K> {
    /// Index of the key among those of the caller.
    index: usize,
    page: u32,
    hash: u32,
    key: &'k K,
}

impl<K: Pod, V: Pod, S: BuildHasher> FarFlatMap<K, V, S> {
    /// Returns the values of several keys, in the order of the keys. Far pages are requested
    /// together, or several keys are looked up in one call at the memory server, so this is faster
    /// than as many [`get`](FarFlatMap::get)s.
    pub fn get_many(&self, scope: &Scope<'_>, keys: &[K]) -> Result<Vec<Option<V>>, FarError> {
        let hashes: Vec<u32> = keys.iter().map(|key| self.hash(key)).collect();
        self.check(scope)?;
        let mut values = vec![None; keys.len()];
        let (mut near, mut far) = (Vec::new(), Vec::new());
        for (index, (key, hash)) in keys.iter().zip(hashes).enumerate() {
            let Some(page) = self.directory.find(hash) else { break };
            let side = if self.pages.is_far(page as usize) { &mut far } else { &mut near };
            side.push(Query { index, page, hash, key });
        }
        // Near ones first: they may leave.
        self.look_up_here(scope, &near, &mut values)?;
        self.look_up_far(scope, &far, &mut values)?;
        Ok(values)
    }
}

impl<K: Pod, V: Pod, S> FarFlatMap<K, V, S> {
    const CALL_KEYS: usize = {
        let key = CALL_BYTES / (size_of::<K>() + KEY_HEAD_BYTES);
        let value = CALL_BYTES / (size_of::<V>() + 1);
        let keys = if key < value { key } else { value };
        if keys < CALL_KEYS { keys } else { CALL_KEYS }
    };

    /// Looks a key of a far page up.
    pub(super) fn get_far(&self, scope: &Scope<'_>, page: u32, hash: u32, key: &K) -> Result<Option<V>, FarError> {
        let mut value = [None];
        self.look_up_far(scope, &[Query { index: 0, page, hash, key }], &mut value)?;
        Ok(value[0])
    }

    /// Looks keys up here.
    fn look_up_here(
        &self,
        scope: &Scope<'_>,
        queries: &[Query<'_, K>],
        values: &mut [Option<V>],
    ) -> Result<(), FarError> {
        for some in queries.chunks(PAGES_AHEAD) {
            if some.len() > 1 {
                let is_far = |page: &usize| self.pages.is_far(*page);
                self.pages.prefetch(scope, some.iter().map(|query| query.page as usize).filter(is_far));
            }
            for Query { index, page, hash, key } in some {
                let found = self.find(scope, *page, *hash, bytes_of(*key))?;
                values[*index] = found.map(|(.., value)| value);
            }
        }
        Ok(())
    }

    /// Looks keys of far pages up, where the map is to do that.
    fn look_up_far(
        &self,
        scope: &Scope<'_>,
        mut queries: &[Query<'_, K>],
        values: &mut [Option<V>],
    ) -> Result<(), FarError> {
        let core = scope.core;
        while !queries.is_empty() {
            let may_ask = self.at != Where::Client && core.may_offload::<Lookup>();
            let (side, count) = match self.at {
                _ if !may_ask => (Side::Client, queries.len() as u64),
                Where::Server => (Side::Server, queries.len() as u64),
                _ => core.with_placement::<Lookup, _>(|placement| placement.round(queries.len() as u64)),
            };
            let some;
            (some, queries) = queries.split_at(queries.len().min(count.max(1) as usize));
            let began = Instant::now();
            let is_answered = match side {
                Side::Server => self.ask_server(scope, some, values)?,
                Side::Client => {
                    self.look_up_here(scope, some, values)?;
                    true
                }
            };
            if self.at == Where::Auto && may_ask {
                let nanos = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
                let count = some.len() as u64;
                core.with_placement::<Lookup, _>(|placement| match is_answered {
                    true => placement.on_ended(side, count, count, nanos),
                    false => placement.on_failed(side, count),
                });
            }
        }
        Ok(())
    }

    /// Asks the server. What it does not answer is looked up here. Returns whether it answered.
    fn ask_server(
        &self,
        scope: &Scope<'_>,
        queries: &[Query<'_, K>],
        values: &mut [Option<V>],
    ) -> Result<bool, FarError> {
        let Some(replies) = self.replies(scope.core, queries) else {
            self.look_up_here(scope, queries, values)?;
            return Ok(false);
        };
        let mut rest = Vec::new();
        for (query, reply) in replies {
            match reply {
                ReplyTo::Found(value) => values[query.index] = Some(value),
                ReplyTo::Absent => values[query.index] = None,
                ReplyTo::Next => rest.push(query),
            }
        }
        // Buckets of several pages are rare.
        self.look_up_here(scope, &rest, values)?;
        Ok(true)
    }

    /// Returns what the server answers to all queries.
    fn replies<'q>(&self, core: &HeapInner, queries: &[Query<'q, K>]) -> Option<Vec<(Query<'q, K>, ReplyTo<V>)>> {
        let layout = core.offload_layout();
        let mut targets: BTreeMap<OffloadTarget, Vec<(u64, Query<'q, K>)>> = BTreeMap::new();
        for query in queries {
            let (target, offset) = layout.place(self.pages.far_range(query.page as usize, 0..1).start);
            targets.entry(target).or_default().push((offset, *query));
        }
        let (mut calls, mut order) = (Vec::new(), Vec::new());
        for (target, queries) in &targets {
            for some in queries.chunks(Self::CALL_KEYS) {
                let batch = LookupBatch {
                    key_bytes: size_of::<K>() as u32,
                    value_bytes: size_of::<V>() as u32,
                    pages: some.iter().map(|(offset, query)| (*offset, query.hash)).collect(),
                    keys: Bytes(some.iter().flat_map(|(_, query)| bytes_of(query.key)).copied().collect()),
                };
                calls.push((*target, batch));
                order.push(some);
            }
        }
        let replies = core.offload::<Lookup>(layout, calls).ok()?;
        let mut all = Vec::with_capacity(queries.len());
        for (some, LookupReply { outcomes, values }) in order.into_iter().zip(replies) {
            if outcomes.len() != some.len() {
                return None;
            }
            let mut values = &values.0[..];
            for ((_, query), outcome) in some.iter().zip(outcomes) {
                let reply = match outcome {
                    LookupOutcome::Absent => ReplyTo::Absent,
                    LookupOutcome::Next => ReplyTo::Next,
                    LookupOutcome::Found => {
                        let (value, rest) = values.split_at_checked(size_of::<V>())?;
                        values = rest;
                        ReplyTo::Found(from_bytes(value))
                    }
                };
                all.push((*query, reply));
            }
        }
        (all.len() == queries.len()).then_some(all)
    }
}

/// Answer of the server to one query.
enum ReplyTo<V> {
    Absent,
    Found(V),
    Next,
}
