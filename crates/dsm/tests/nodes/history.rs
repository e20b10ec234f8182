//! Linearizability: whether each call of a history may have had its effect at one moment between its begin and
//! its end.
//!
//! The search is Wing's and Gong's ("Testing and Verifying Concurrent Objects", 1993), with the memory of Lowe's
//! ("Testing for Linearizability", 2017): it takes any call that began before all others ended as the next one,
//! if that may have returned what it did, and never tries the same calls with the same object behind them twice.

use farfield_dsm::Far;
use std::collections::{HashSet, VecDeque};

/// Effect of a call on an object, and what it returned. A result that nobody knows is `None`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Far)]
pub(crate) enum Step {
    /// The value was found.
    Read(u64),
    Write(u64),
    Swap {
        new: u64,
        found: u64,
    },
    Add {
        more: u64,
        found: Option<u64>,
    },
    /// Writes the new value if the current one is found.
    Exchange {
        current: u64,
        new: u64,
        found: Option<u64>,
    },
    Send(u64),
    /// There was no room for a value.
    Refused,
    Receive(u64),
    /// There was no value.
    Empty,
}

/// A call: when it began and ended, in nanoseconds of the machine's clock.
#[derive(Clone, Copy, Debug, Far)]
pub(crate) struct Call {
    pub(crate) called: u64,
    /// [`Call::NEVER`] if it was not answered: it may have its effect at any time, or never.
    pub(crate) returned: u64,
    pub(crate) step: Step,
}

impl Call {
    pub(crate) const NEVER: u64 = u64::MAX;
}

/// Object that does one step at a time.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Sequential {
    Number(u64),
    Queue { room: usize, values: VecDeque<u64> },
}

impl Sequential {
    /// Returns an empty channel with this bound. With a bound of zero a sender waits until its value is received,
    /// which is as if there were room for one and nobody had been told.
    pub(crate) fn channel(bound: usize) -> Sequential {
        Sequential::Queue { room: bound.max(1), values: VecDeque::new() }
    }

    /// Does a step. Returns whether the step may have returned what it did.
    fn step(&mut self, step: &Step) -> bool {
        match self {
            Sequential::Number(value) => match *step {
                Step::Read(found) => found == *value,
                Step::Write(new) => {
                    *value = new;
                    true
                }
                Step::Swap { new, found } => std::mem::replace(value, new) == found,
                Step::Add { more, found } => {
                    *value += more;
                    found.is_none_or(|found| found + more == *value)
                }
                Step::Exchange { current, new, found } => {
                    let is_so = found.is_none_or(|found| found == *value);
                    if *value == current {
                        *value = new;
                    }
                    is_so
                }
                Step::Send(_) | Step::Refused | Step::Receive(_) | Step::Empty => false,
            },
            Sequential::Queue { room, values } => match *step {
                Step::Send(value) => {
                    values.push_back(value);
                    values.len() <= *room
                }
                Step::Refused => values.len() == *room,
                Step::Receive(value) => values.pop_front() == Some(value),
                Step::Empty => values.is_empty(),
                _ => false,
            },
        }
    }
}

/// Calls of a history that have had their effects in the order in which they were tried.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Done(Box<[u64]>);

impl Done {
    fn has(&self, call: usize) -> bool {
        self.0[call / 64] >> (call % 64) & 1 == 1
    }

    fn flip(&mut self, call: usize) {
        self.0[call / 64] ^= 1 << (call % 64);
    }
}

/// Why a history is not linearizable: the most calls that some order explains, and those of which none can be next.
#[derive(Debug)]
#[allow(dead_code, reason = "a failed test prints it")]
pub(crate) struct NotLinearizable {
    explained: usize,
    object: Sequential,
    next: Vec<Call>,
}

impl NotLinearizable {
    /// Returns the most answered calls that some order explains.
    pub(crate) fn explained(&self) -> usize {
        self.explained
    }
}

/// Tells whether an object that starts like this may have done these calls.
pub(crate) fn check(start: Sequential, mut calls: Vec<Call>) -> Result<(), NotLinearizable> {
    calls.sort_by_key(|call| call.called);
    let answered = calls.iter().filter(|call| call.returned != Call::NEVER).count();
    // Calls that may be next, the earliest one last.
    let candidates = |done: &Done| {
        let (mut found, mut end) = (Vec::new(), Call::NEVER);
        for (index, call) in calls.iter().enumerate().filter(|(index, _)| !done.has(*index)) {
            if call.called > end {
                break;
            }
            end = end.min(call.returned);
            found.push(index);
        }
        found.reverse();
        found
    };
    let mut done = Done(vec![0; calls.len().div_ceil(64)].into());
    let mut tried = HashSet::new();
    // Objects before each call that was taken, that call, and the others that may be taken instead.
    let mut path: Vec<(Sequential, Option<usize>, Vec<usize>)> = vec![(start, None, candidates(&done))];
    let mut explained = 0;
    let mut farthest = NotLinearizable { explained: 0, object: path[0].0.clone(), next: Vec::new() };
    while let Some((object, taken, others)) = path.last_mut() {
        if let Some(before) = taken.take() {
            done.flip(before);
            explained -= usize::from(calls[before].returned != Call::NEVER);
        }
        if explained == answered {
            return Ok(());
        }
        let Some(call) = others.pop() else {
            path.pop();
            continue;
        };
        let mut object = object.clone();
        if !object.step(&calls[call].step) {
            continue;
        }
        done.flip(call);
        if !tried.insert((done.clone(), object.clone())) {
            done.flip(call);
            continue;
        }
        *taken = Some(call);
        explained += usize::from(calls[call].returned != Call::NEVER);
        let next = candidates(&done);
        if explained > farthest.explained || path.len() == 1 {
            let next = next.iter().map(|index| calls[*index]).collect();
            farthest = NotLinearizable { explained, object: object.clone(), next };
        }
        path.push((object, None, next));
    }
    Err(farthest)
}

fn call(called: u64, returned: u64, step: Step) -> Call {
    Call { called, returned, step }
}

/// Histories of which it is known what they are.
pub(crate) fn wrong_histories_are_told_from_right_ones() {
    use Step::{Add, Empty, Exchange, Read, Receive, Refused, Send, Swap, Write};
    let is_right = |start: &Sequential, calls: &[Call]| check(start.clone(), calls.to_vec()).is_ok();
    let number = Sequential::Number(0);
    // Two writers and two readers who see the values in the other order, and in this one.
    let writes = [call(0, 9, Write(1)), call(0, 9, Write(2))];
    let reads = |one, two| [call(1, 2, Read(one)), call(3, 4, Read(two))];
    assert!(is_right(&number, &[writes, reads(2, 1)].concat()));
    assert!(is_right(&number, &[writes, reads(1, 2)].concat()));
    assert!(!is_right(&number, &[writes.to_vec(), reads(2, 1).into(), reads(1, 2).into()].concat()));
    // What is read after a write has ended is not older; sequential consistency would allow that.
    assert!(!is_right(&number, &[call(0, 1, Write(1)), call(2, 3, Read(0))]));
    assert!(is_right(&number, &[call(0, 2, Write(1)), call(1, 3, Read(0))]));
    // A value that is gone does not come back: a stale copy.
    assert!(!is_right(&number, &[call(0, 5, Write(1)), call(1, 2, Read(1)), call(3, 4, Read(0))]));
    // Lost updates, and two winners.
    let add = |found| call(0, 9, Add { more: 1, found });
    assert!(is_right(&number, &[add(Some(1)), add(Some(0)), add(Some(2))]));
    assert!(!is_right(&number, &[add(Some(0)), add(Some(0))]));
    let exchange = |new, found| call(0, 9, Exchange { current: 0, new, found });
    assert!(is_right(&number, &[exchange(5, Some(6)), exchange(6, Some(0))]));
    assert!(!is_right(&number, &[exchange(5, Some(0)), exchange(6, Some(0))]));
    assert!(!is_right(&number, &[call(0, 9, Swap { new: 5, found: 0 }), call(0, 9, Swap { new: 6, found: 0 })]));
    // A step that was not answered is done late, or never; not twice, and not before it began.
    let unanswered = call(2, Call::NEVER, Add { more: 4, found: None });
    for (found, is_so) in [([0, 0], true), ([0, 4], true), ([4, 4], true), ([4, 0], false), ([4, 8], false)] {
        let reads = [call(3, 4, Read(found[0])), call(5, 6, Read(found[1]))];
        assert_eq!(is_right(&number, &[&reads[..], &[unanswered]].concat()), is_so, "{found:?}");
    }
    assert!(!is_right(&number, &[unanswered, call(0, 1, Read(4))]));
    // Queues: in order, once, and with a bound.
    let queue = Sequential::channel(2);
    let sent = [call(0, 1, Send(1)), call(2, 3, Send(2))];
    let received = |one, two| [call(4, 9, Receive(one)), call(4, 9, Receive(two))];
    assert!(is_right(&queue, &[sent, received(2, 1)].concat()), "both receive at once");
    let one_by_one = |one, two| [call(4, 5, Receive(one)), call(6, 7, Receive(two))];
    assert!(is_right(&queue, &[sent, one_by_one(1, 2)].concat()));
    assert!(!is_right(&queue, &[sent, one_by_one(2, 1)].concat()), "out of order");
    assert!(!is_right(&queue, &[sent, received(1, 1)].concat()), "a value arrived twice");
    assert!(!is_right(&queue, &[sent[0], call(2, 3, Receive(1)), call(4, 5, Receive(1))]));
    assert!(!is_right(&queue, &[sent[0], call(2, 3, Empty)]), "a value is lost");
    assert!(
        !is_right(&queue, &[sent[0], call(2, 3, Refused)])
            && is_right(&queue, &[&sent[..], &[call(4, 5, Refused)]].concat())
    );
    assert!(!is_right(&queue, &[&sent[..], &[call(4, 5, Send(3))]].concat()), "there was no room");
    assert!(is_right(&queue, &[&sent[..], &[call(4, 8, Send(3)), call(6, 7, Receive(1))]].concat()));

    // Histories that were made of an order are right; one wrong result is found.
    let mut random = fastrand::Rng::with_seed(3);
    let (mut wrong, histories) = (0, 300);
    for _ in 0..histories {
        let (mut object, mut calls) = (Sequential::Number(0), Vec::new());
        for moment in 1..60u64 {
            let Sequential::Number(value) = object else { unreachable!("it is a number") };
            let step = match random.u8(..4) {
                0 => Read(value),
                1 => Write(moment),
                2 => Swap { new: moment, found: value },
                _ => Add { more: moment, found: Some(value) },
            };
            assert!(object.step(&step));
            let [before, after] = [random.u64(..50), random.u64(..50)];
            calls.push(call((moment * 10).saturating_sub(before), moment * 10 + after, step));
        }
        check(Sequential::Number(0), calls.clone()).expect("it was made of an order");
        let changed = random.usize(..calls.len());
        match &mut calls[changed].step {
            Read(found) | Swap { found, .. } | Add { found: Some(found), .. } => *found += 1 << 40,
            _ => continue,
        }
        wrong += 1;
        assert!(!is_right(&number, &calls), "nobody has written such a value");
    }
    assert!(wrong > histories / 2);
}
