//! A whole connection as the server sees it, in pieces of any size: it asks for more only when it needs more, never uses
//! more than there is, and never comes back from the dead.
#![no_main]

use arbitrary::Arbitrary;
use farfield_core::Incarnation;
use farfield_core::session::{ServerAction, ServerConversation};
use farfield_core::wire::{Hello, SessionSecret, Welcome};
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    greet: bool,
    pieces: Vec<&'a [u8]>,
    answer_at_once: bool,
}

fuzz_target!(|input: Input<'_>| {
    let mut received = Vec::new();
    if input.greet {
        let hello =
            Hello { version_min: 1, version_max: 1, features: 0, session: None, token: b"token", client_name: "fuzz" };
        hello.encode(&mut received);
    }
    let mut conversation = ServerConversation::new();
    let mut broken = false;
    for piece in input.pieces {
        received.extend_from_slice(piece);
        loop {
            let (used, welcomed, request) = match conversation.step(&received) {
                ServerAction::Need { bytes } => {
                    assert!(bytes > received.len());
                    assert!(!broken);
                    break;
                }
                ServerAction::Broken { .. } => {
                    broken = true;
                    break;
                }
                ServerAction::Hello { used, version, .. } => (used, version.is_some(), false),
                ServerAction::Request { used, .. } => (used, false, true),
                ServerAction::Fail { used, .. } => (used, false, false),
            };
            assert!(!broken && used > 0 && used <= received.len());
            if welcomed {
                conversation.on_welcome(&Welcome {
                    version: 1,
                    lease_ms: 0,
                    features: 0,
                    incarnation: Incarnation(1),
                    session: SessionSecret(1),
                    batch_pages_max: 8,
                    in_flight_max: 4,
                });
            } else if !conversation.is_open() {
                return; // No version in common: the server closes.
            }
            assert!(conversation.in_flight() <= 4);
            if request && input.answer_at_once {
                conversation.on_answered();
            }
            received.drain(..used);
        }
    }
});
