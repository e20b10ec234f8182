//! `ff.sandbox`: runs a function of shipped code. It is itself an ordinary function, so it runs at
//! each place and within the same budgets.

use crate::abi::{Begin, GuestMessage, HostReply, PlaceRequest, ROUND_BYTES_MAX};
use crate::engine::{Entry, Guest, GuestFailure};
use crate::ship::Ship;
use crate::store::{Digest, with_store};
use core::future::pending;
use farfield_wic::access::{Access, Answer, Bytes};
use farfield_wic::{Fault, Function, Place, Registry};
use serde::{Deserialize, Serialize};

/// Adds the functions that accept and run shipped code.
pub fn with_sandbox(registry: Registry) -> Registry {
    registry.with::<Ship>().with::<SandboxFunction>()
}

/// Runs a function of shipped code.
#[derive(Debug)]
pub(crate) struct SandboxFunction;

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

impl Function for SandboxFunction {
    const NAME: &'static str = "ff.sandbox";
    const VERSION: u32 = 1;
    type Argument = SandboxRequest;
    type Answer = SandboxReply;

    async fn run<P: Place>(place: &P, run: SandboxRequest) -> Result<SandboxReply, Fault> {
        let Some(code) = with_store(|store| store.get(&run.code)) else { return Ok(SandboxReply::NoCode) };
        let mut guest = match Guest::new(&code) {
            Ok(guest) => guest,
            Err(GuestFailure(reason)) => return Ok(SandboxReply::Broken(reason)),
        };
        let SandboxRequest { name, version, argument, .. } = run;
        let begin = Begin { name, version, region_bytes: place.region_bytes(), argument };
        let mut message = guest.tell(Entry::Begin, &begin, || place.yield_now()).await;
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
            message = guest.tell(Entry::GoOn, &reply, || place.yield_now()).await;
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
