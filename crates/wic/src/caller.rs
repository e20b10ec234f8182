//! Calls of functions, at the client or at the server.

use crate::client::ClientPlace;
use crate::executor::{self, Budget, NewTask};
use crate::registry::decode;
use crate::{CallError, Function, Stop};
use core::marker::PhantomData;
use core::pin::pin;
use core::time::Duration;
use farfield_core::policy::call_placement::{CallPlacement, CallPlacementDecision, Side};
use farfield_core::wire::CallBody;
use farfield_pool::{Backend, CallChannel, CallLane, FarCall, PoolError};
use std::sync::Arc;
use std::time::Instant;

/// Default time limit of a call.
const WITHIN: Duration = Duration::from_secs(10);
/// Default limit of the steps of a function.
const STEPS_MAX: u64 = 1 << 20;
/// Bytes that are enough for most arguments.
const ARGUMENT_BYTES: usize = 32;
/// Most functions that run side by side at the client.
const WINDOW: usize = 64;

/// Place where a function runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Where {
    /// At the client, with one-sided accesses: a round trip for each.
    Client,
    /// At the server beside the memory: one round trip for all accesses.
    Server,
    /// At the place that was faster lately ([`Caller::choices`]); at the client if the server does
    /// not run the function.
    Auto,
}

/// Calls functions over one region, for one thread. Lanes are opened when they are first needed.
pub struct Caller {
    backend: Arc<dyn Backend>,
    client: Option<ClientPlace>,
    server: Option<Box<dyn CallChannel>>,
    /// Channel for functions that only read, used if there is no single server.
    reads: Option<Box<dyn CallChannel>>,
    ended: Vec<farfield_pool::CallEnd>,
    /// Measurements of each function, in the order of the subjects.
    placements: Vec<(Subject, CallPlacement)>,
}

/// Function to which measurements belong.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Subject {
    name: &'static str,
    version: u32,
    /// Name of the function that is called to run it: itself, or one that runs others.
    by: &'static str,
}

impl Subject {
    fn of<F: Function>(by: &'static str) -> Subject {
        Subject { name: F::NAME, version: F::VERSION, by }
    }
}

impl core::fmt::Debug for Caller {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Caller({} pages)", self.backend.pages())
    }
}

impl Caller {
    /// Makes a caller of functions over the region of this backend. At the server, functions see
    /// what the pool was told: changes that a heap has near must be written back before.
    pub fn new(backend: Arc<dyn Backend>) -> Caller {
        Caller { backend, client: None, server: None, reads: None, ended: Vec::new(), placements: Vec::new() }
    }

    /// Makes a caller that uses this channel, whatever it leads to, for calls that do not run at
    /// the client.
    pub fn through(backend: Arc<dyn Backend>, channel: Box<dyn CallChannel>) -> Caller {
        Caller { server: Some(channel), ..Caller::new(backend) }
    }

    /// Prepares a call of one function.
    pub fn call<F: Function>(&mut self, argument: F::Argument) -> Call<'_, F> {
        Call(self.calls(vec![argument]))
    }

    /// Prepares calls of one function, one for each of the arguments; many are in flight at a time.
    pub fn calls<F: Function>(&mut self, arguments: Vec<F::Argument>) -> Calls<'_, F> {
        let terms = Terms { place: Where::Client, within: WITHIN, steps_max: STEPS_MAX };
        Calls { caller: self, arguments, terms, subject: Subject::of::<F>(F::NAME), function: PhantomData }
    }

    /// Returns where functions that were called at [`Where::Auto`] run, and why; by name.
    pub fn choices(&self) -> impl Iterator<Item = (&'static str, CallPlacementDecision)> + '_ {
        self.placements.iter().map(|(subject, placement)| (subject.name, placement.choice()))
    }

    /// Returns the index of the measurements of this subject.
    fn placement(&mut self, subject: Subject) -> usize {
        self.placements.binary_search_by_key(&subject, |(subject, _)| *subject).unwrap_or_else(|index| {
            self.placements.insert(index, (subject, CallPlacement::new()));
            index
        })
    }

    /// Runs the calls in rounds: a round that measures the other side has only a few calls.
    fn run_auto<F: Function>(&mut self, subject: Subject, mut rest: Vec<F::Argument>, terms: Terms) -> Answers<F> {
        let placement = self.placement(subject);
        let mut now = Instant::now();
        let until = now.checked_add(terms.within);
        let mut answers = Vec::new();
        while !rest.is_empty() {
            let (side, count) = self.placements[placement].1.round(rest.len() as u64);
            let later = rest.split_off(count as usize);
            let within = until.map_or(terms.within, |until| until.saturating_duration_since(now));
            let round;
            (round, now) = self.run_at::<F>(placement, side, rest, now, Terms { within, ..terms });
            match answers.is_empty() {
                true => answers = round,
                false => answers.extend(round),
            }
            rest = later;
        }
        answers
    }

    /// Runs the calls on the chosen side, records the time they took, and repeats at the client
    /// those that the server does not run. Also returns the time at the end.
    fn run_at<F: Function>(
        &mut self,
        placement: usize,
        side: Side,
        arguments: Vec<F::Argument>,
        started: Instant,
        terms: Terms,
    ) -> (Answers<F>, Instant) {
        let mut steps = 0;
        let mut answers = match side {
            Side::Client => self.run_at_client::<F>(arguments.clone(), started, terms, &mut steps),
            Side::Server => self.run_at_server::<F>(arguments.clone(), started, terms, &mut steps),
        };
        let mut now = Instant::now();
        let answered = answers.iter().filter(|answer| answer.is_ok()).count() as u64;
        let nanos = |now: Instant| u64::try_from((now - started).as_nanos()).unwrap_or(u64::MAX);
        if answered == answers.len() as u64 {
            self.placements[placement].1.on_ended(side, answered, steps, nanos(now));
            return (answers, now);
        }
        let is_too_long =
            |error: &CallError| matches!(error, CallError::ArgumentTooLong { .. } | CallError::AnswerTooLong);
        // A call that is too long for the server has an answer too, after the time that it takes to
        // have it here.
        let answers_all = answers.iter().flat_map(|answer| answer.as_ref().err()).all(is_too_long);
        if !answers_all {
            self.placements[placement].1.on_failed(side, answers.len() as u64);
        }
        let is_elsewhere = |error: &CallError| {
            matches!(error, CallError::Nowhere | CallError::NoFunction { .. } | CallError::OtherVersion { .. })
        };
        let is_away = |error: &CallError| is_elsewhere(error) || *error == CallError::NotNow;
        if side == Side::Server && answers.iter().flat_map(|answer| answer.as_ref().err()).any(is_elsewhere) {
            self.placements[placement].1.on_refused();
        }
        for (answer, argument) in answers.iter_mut().zip(arguments) {
            let goes_on = match answer {
                Err(CallError::Overrun { .. } | CallError::AnswerTooLong) => side == Side::Server && F::REPEATABLE,
                Err(CallError::ArgumentTooLong { .. }) => side == Side::Server,
                Err(error) => side == Side::Server && is_away(error),
                Ok(_) => false,
            };
            if goes_on {
                let within = terms.within.saturating_sub(now - started);
                let again = self.run_at_client::<F>(vec![argument], now, Terms { within, ..terms }, &mut steps);
                again.into_iter().for_each(|again| *answer = again);
                now = Instant::now();
            }
        }
        if answers_all {
            let (placement, calls) = (&mut self.placements[placement].1, answers.len() as u64);
            match answers.iter().all(Result::is_ok) {
                true => placement.on_ended(side, calls, steps, nanos(now)),
                false => placement.on_failed(side, calls),
            }
        }
        (answers, now)
    }

    fn run_at_client<F: Function>(
        &mut self,
        arguments: Vec<F::Argument>,
        started: Instant,
        terms: Terms,
        steps: &mut u64,
    ) -> Answers<F> {
        let budget = Budget { steps_max: terms.steps_max, until: started.checked_add(terms.within) };
        // If a function panics, its operations in flight end with its place.
        let place = match self.client.take().map_or_else(|| ClientPlace::new(&self.backend), Ok) {
            Ok(place) => place,
            Err(error) => return fail_all::<F>(arguments.len(), CallError::Fault(error.into())),
        };
        let here = &place;
        let mut answers: Answers<F> = arguments.iter().map(|_| Err(CallError::Stuck)).collect();
        let count = arguments.len();
        let mut waiting = arguments.into_iter().enumerate();
        let next = || waiting.next().map(|(id, argument)| NewTask { id, future: F::run(here, argument), budget });
        let end = |id: usize, result: Result<F::Answer, Stop>, took| {
            answers[id] = result.map_err(|stop| CallError::of_stop(stop, terms.within));
            *steps += took;
        };
        match count {
            1 => executor::run(here, &mut [pin!(None)], next, end),
            _ => {
                let mut slots: Vec<_> = (0..count.min(WINDOW)).map(|_| Box::pin(None)).collect();
                executor::run(here, &mut slots, next, end);
            }
        }
        place.flush();
        self.client = Some(place);
        answers
    }

    /// Returns the channel to the server, or to one of several for functions that only read.
    fn channel(&mut self, only_reads: bool) -> Result<&mut dyn CallChannel, PoolError> {
        if self.server.is_none() && !(only_reads && self.reads.is_some()) {
            match self.backend.open_calls() {
                Ok(lane) => self.server = Some(lane),
                Err(PoolError::Refused { reason: CallLane::NOWHERE, .. }) if only_reads => {
                    self.reads = Some(self.backend.open_reads()?);
                }
                Err(error) => return Err(error),
            }
        }
        match (&mut self.server, &mut self.reads) {
            (Some(lane), _) => Ok(&mut **lane),
            (None, Some(reads)) => Ok(&mut **reads),
            (None, None) => Err(PoolError::Refused { server: 0, reason: CallLane::NOWHERE }),
        }
    }

    fn run_at_server<F: Function>(
        &mut self,
        arguments: Vec<F::Argument>,
        started: Instant,
        terms: Terms,
        steps: &mut u64,
    ) -> Answers<F> {
        let mut ended = core::mem::take(&mut self.ended);
        let lane = match self.channel(F::ONLY_READS) {
            Ok(lane) => lane,
            Err(error) => return fail_all::<F>(arguments.len(), error.into()),
        };
        let mut answers: Answers<F> = arguments.iter().map(|_| Err(CallError::Argument)).collect();
        let mut waiting = arguments.into_iter().enumerate();
        let mut refused = None;
        let mut deadline = terms.within;
        loop {
            while lane.in_flight() < CallLane::CALLS_MAX {
                let call = refused.take().or_else(|| {
                    waiting.by_ref().find_map(|(id, argument)| {
                        let argument = postcard::to_extend(&argument, Vec::with_capacity(ARGUMENT_BYTES)).ok()?;
                        if argument.len() > CallBody::ARGUMENT_BYTES_MAX {
                            answers[id] = Err(CallError::ArgumentTooLong { bytes: argument.len() as u64 });
                            return None;
                        }
                        Some(FarCall {
                            tag: id as u64,
                            deadline,
                            steps_max: u32::try_from(terms.steps_max).unwrap_or(u32::MAX),
                            name: F::NAME,
                            version: F::VERSION,
                            argument,
                        })
                    })
                });
                let Some(call) = call else { break };
                if let Err(call) = lane.submit(call) {
                    refused = Some(call);
                    break;
                }
            }
            if lane.in_flight() == 0 && refused.is_none() {
                self.ended = ended;
                return answers;
            }
            if lane.poll(&mut ended) == 0 {
                lane.wait(terms.within);
                lane.poll(&mut ended);
            }
            if waiting.len() > 0 || refused.is_some() {
                deadline = terms.within.saturating_sub(started.elapsed());
            }
            for ended in ended.drain(..) {
                *steps += u64::from(ended.steps);
                answers[ended.tag as usize] = match ended.result {
                    Ok(bytes) => decode(&bytes).ok_or(CallError::Answer),
                    Err(failure) => Err(CallError::of_failure(failure, F::NAME, F::VERSION, terms.within)),
                };
            }
        }
    }
}

type Answers<F> = Vec<Result<<F as Function>::Answer, CallError>>;

fn fail_all<F: Function>(count: usize, error: CallError) -> Answers<F> {
    (0..count).map(|_| Err(error)).collect()
}

#[derive(Clone, Copy)]
struct Terms {
    place: Where,
    within: Duration,
    steps_max: u64,
}

/// Calls of one function, about to run.
#[must_use = "nothing runs before `run`"]
pub struct Calls<'c, F: Function> {
    caller: &'c mut Caller,
    arguments: Vec<F::Argument>,
    terms: Terms,
    subject: Subject,
    function: PhantomData<F>,
}

impl<F: Function> core::fmt::Debug for Calls<'_, F> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Calls({} of {:?} at {:?})", self.arguments.len(), F::NAME, self.terms.place)
    }
}

impl<F: Function> Calls<'_, F> {
    /// Sets the place where the calls run. Default: the client.
    pub fn at(mut self, place: Where) -> Self {
        self.terms.place = place;
        self
    }

    /// Counts the time of these calls as that of `G`, which they run ([`Where::Auto`]).
    pub fn on_behalf_of<G: Function>(mut self) -> Self {
        self.subject = Subject::of::<G>(F::NAME);
        self
    }

    /// Sets how long all of them may take together. Default: 10 s. A server has a limit of its own
    /// for each.
    pub fn within(mut self, time: Duration) -> Self {
        self.terms.within = time;
        self
    }

    /// Sets the most steps that each may take. Default: about a million. A server has a limit of
    /// its own.
    pub fn steps(mut self, most: u64) -> Self {
        self.terms.steps_max = most.max(1);
        self
    }

    /// Runs the calls and waits. The answers are in the order of the arguments.
    pub fn run(self) -> Vec<Result<F::Answer, CallError>> {
        match self.terms.place {
            Where::Client => self.caller.run_at_client::<F>(self.arguments, Instant::now(), self.terms, &mut 0),
            Where::Server => self.caller.run_at_server::<F>(self.arguments, Instant::now(), self.terms, &mut 0),
            Where::Auto => self.caller.run_auto::<F>(self.subject, self.arguments, self.terms),
        }
    }
}

/// A call of one function, about to run.
#[must_use = "nothing runs before `run`"]
#[derive(Debug)]
pub struct Call<'c, F: Function>(Calls<'c, F>);

impl<F: Function> Call<'_, F> {
    /// Sets the place where the call runs. Default: the client.
    pub fn at(self, place: Where) -> Self {
        Call(self.0.at(place))
    }

    /// Sets how long the call may take. Default: 10 s. A server has a limit of its own.
    pub fn within(self, time: Duration) -> Self {
        Call(self.0.within(time))
    }

    /// Sets the most steps that the call may take. Default: about a million. A server has a limit
    /// of its own.
    pub fn steps(self, most: u64) -> Self {
        Call(self.0.steps(most))
    }

    /// Runs the call and waits for the answer.
    pub fn run(self) -> Result<F::Answer, CallError> {
        self.0.run().pop().expect("one answer for each argument")
    }
}
