//! `ff.sandbox`: runs a function of shipped code. It is itself an ordinary function, so it runs at
//! each place and within the same budgets.

use crate::abi::{Begin, GuestMessage, HostReply, PlaceRequest, ROUND_BYTES_MAX};
use crate::engine::{Export, Guest, GuestFailure, GuestHost, SandboxEngine};
use crate::ship::Ship;
use crate::store::{Digest, with_store};
use core::future::pending;
use core::marker::PhantomData;
use farfield_wic::access::{Access, Answer, Bytes};
use farfield_wic::{Fault, Function, Place, Registry};
use serde::{Deserialize, Serialize};

/// Adds the functions that accept and run shipped code, on the default [`SandboxEngine`].
pub fn with_sandbox(registry: Registry) -> Registry {
    with_sandbox_by(registry, SandboxEngine::default())
}

/// Adds the functions that accept shipped code, and run it on this engine.
pub fn with_sandbox_by(registry: Registry, engine: SandboxEngine) -> Registry {
    let registry = registry.with::<Ship>();
    match engine {
        SandboxEngine::Tiered => registry.with::<SandboxFunction>(),
        SandboxEngine::Interpreted => registry.with::<SandboxFunction<Interpreted>>(),
        #[cfg(feature = "compiled")]
        SandboxEngine::Compiled => registry.with::<SandboxFunction<Compiled>>(),
    }
}

/// Engine of a [`SandboxFunction`].
pub(crate) trait ChosenEngine: 'static {
    const ENGINE: SandboxEngine;
}

/// Chooses [`SandboxEngine::Tiered`].
#[derive(Debug)]
pub(crate) struct Tiered;

/// Chooses [`SandboxEngine::Interpreted`].
#[derive(Debug)]
pub(crate) struct Interpreted;

/// Chooses [`SandboxEngine::Compiled`].
#[cfg(feature = "compiled")]
#[derive(Debug)]
pub(crate) struct Compiled;

impl ChosenEngine for Tiered {
    const ENGINE: SandboxEngine = SandboxEngine::Tiered;
}

impl ChosenEngine for Interpreted {
    const ENGINE: SandboxEngine = SandboxEngine::Interpreted;
}

#[cfg(feature = "compiled")]
impl ChosenEngine for Compiled {
    const ENGINE: SandboxEngine = SandboxEngine::Compiled;
}

/// Runs a function of shipped code.
#[derive(Debug)]
pub(crate) struct SandboxFunction<E = Tiered>(PhantomData<E>);

/// Function to run, and its argument.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SandboxRequest {
    pub(crate) code: Digest,
    pub(crate) name: String,
    pub(crate) version: u32,
    pub(crate) argument: Bytes,
}

/// Result of a run.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum SandboxReply {
    Answer(Bytes),
    /// The code is not here: ship it.
    NoCode,
    NoFunction,
    OtherVersion {
        newest: u32,
    },
    Argument,
    Broken(String),
}

impl<E: ChosenEngine> Function for SandboxFunction<E> {
    const NAME: &'static str = "ff.sandbox";
    const VERSION: u32 = 1;
    type Argument = SandboxRequest;
    type Answer = SandboxReply;

    async fn run<P: Place>(place: &P, run: SandboxRequest) -> Result<SandboxReply, Fault> {
        let Some(code) = with_store(|store| store.get(&run.code)) else { return Ok(SandboxReply::NoCode) };
        let mut guest = match Guest::new(&code, E::ENGINE).await {
            Ok(guest) => guest,
            Err(GuestFailure(reason)) => return Ok(SandboxReply::Broken(reason)),
        };
        let SandboxRequest { name, version, argument, .. } = run;
        let begin = Begin { name, version, region_bytes: place.region_bytes(), argument };
        let host = PlaceHost(place);
        let mut message = guest.tell(Export::Begin, &begin, &host).await;
        loop {
            let requests = match message {
                Ok(GuestMessage::Wants(requests)) => requests,
                Ok(GuestMessage::Ended { result, given_back }) => {
                    given_back.iter().for_each(|back| place.give_back(back.lock, back.ask));
                    return result.map(SandboxReply::Answer);
                }
                Ok(GuestMessage::NoFunction) => return Ok(SandboxReply::NoFunction),
                Ok(GuestMessage::OtherVersion { newest }) => return Ok(SandboxReply::OtherVersion { newest }),
                Ok(GuestMessage::Argument) => return Ok(SandboxReply::Argument),
                Ok(GuestMessage::Confused) => return Ok(SandboxReply::Broken("it did not understand its host".into())),
                Err(GuestFailure(reason)) => return Ok(SandboxReply::Broken(reason)),
            };
            if requests.is_empty() {
                // The guest waits for something that its place does not provide.
                pending::<()>().await;
            }
            let answers = match answer_all(place, requests).await? {
                Ok(answers) => answers,
                Err(GuestFailure(reason)) => return Ok(SandboxReply::Broken(reason)),
            };
            let reply = HostReply { now: place.now(), answers };
            message = guest.tell(Export::GoOn, &reply, &host).await;
        }
    }
}

/// A guest's host at a place.
struct PlaceHost<'p, P>(&'p P);

impl<P: Place> GuestHost for PlaceHost<'_, P> {
    async fn turn(&self) {
        self.0.yield_now().await;
    }

    async fn read(&self, offset: u64, into: &mut [u8]) -> bool {
        match self.0.read_range(offset, into.len()).await {
            Ok(bytes) => {
                into.copy_from_slice(&bytes);
                true
            }
            Err(_) => false,
        }
    }
}

type Answers = Vec<(u32, Result<Answer, Fault>)>;

/// Handles requests in their order. A lost server ends the function, because nothing that it could
/// do would have an effect.
async fn answer_all<P: Place>(
    place: &P,
    requests: Vec<(u32, PlaceRequest)>,
) -> Result<Result<Answers, GuestFailure>, Fault> {
    let (mut answers, mut bytes) = (Vec::with_capacity(requests.len()), 0);
    for (number, request) in requests {
        let answer = match request {
            PlaceRequest::Access(ask) => match Access::run(place, ask).await {
                Err(fault @ Fault::Lost(_)) => return Err(fault),
                answer => answer,
            },
            PlaceRequest::Pause(time) => {
                place.pause(time).await;
                Ok(Answer::Done)
            }
            PlaceRequest::Turn => {
                place.yield_now().await;
                Ok(Answer::Done)
            }
            PlaceRequest::GiveBack(back) => {
                place.yield_now().await;
                place.give_back(back.lock, back.ask);
                continue;
            }
        };
        if let Ok(Answer::Bytes(Bytes(read))) = &answer {
            bytes += read.len();
        }
        if bytes > ROUND_BYTES_MAX {
            return Ok(Err(GuestFailure(format!("it reads more than {ROUND_BYTES_MAX} bytes at a time"))));
        }
        answers.push((number, answer));
    }
    Ok(Ok(answers))
}
