//! A lane under a server that says anything at any time: every operation ends exactly once.
#![no_main]

use arbitrary::Arbitrary;
use core::time::Duration;
use farfield_core::session::{ClientConversation, ExpiredOperation, PageOperation, ReplyEvent};
use farfield_core::time::Moment;
use farfield_core::wire::{HEADER_BYTES, MessageHeader, PagePart};
use farfield_core::{PageId, RegionId};
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
enum Move {
    Submit { background: bool, kind: u8, count: u8, wait: u16 },
    Send,
    Sent(u8),
    Raw([u8; HEADER_BYTES]),
    Answer { slot: u8, kind: u8, code: u16, count: u8, body: u16, age: i8 },
    Pass(u16),
    Finish(u8),
}

fuzz_target!(|moves: Vec<Move>| {
    let mut client: ClientConversation<usize> = ClientConversation::new(RegionId(1), 4, 3, 16);
    let mut now = Moment(0);
    let mut open = std::collections::BTreeSet::new();
    let mut generations = [0u32; 4];
    let mut sending = Vec::new();
    for (number, step) in moves.into_iter().enumerate() {
        let mut ended = None;
        match step {
            Move::Submit { background, kind, count, wait } => {
                let (page, count) = (PageId(number as u64), u32::from(count).max(1));
                let part = PagePart::new(usize::from(wait) % 3840, count as usize).expect("it ends within the page");
                let call = match kind % 4 {
                    0 => PageOperation::Read { page, count },
                    1 => PageOperation::Write { page, count },
                    2 => PageOperation::ReadPart { page, part },
                    _ => PageOperation::Discard { page, count },
                };
                let wait = Duration::from_nanos(wait.into());
                match client.submit(now, call, background, wait, number) {
                    Ok(()) => assert!(open.insert(number)),
                    Err(back) => assert!(back == number && open.len() == 4),
                }
            }
            Move::Send => {
                if let Some(sent) = client.poll_send(now) {
                    generations[sent.slot as usize] = (sent.header.tag >> 32) as u32;
                    sending.push(sent.slot);
                }
            }
            Move::Sent(nth) if !sending.is_empty() => {
                let slot = sending.remove(usize::from(nth) % sending.len());
                client.on_sent(slot);
            }
            Move::Raw(bytes) => {
                if let Ok(Some(header)) = MessageHeader::decode(&bytes) {
                    ended = heard(&mut client, &header);
                }
            }
            Move::Answer { slot, kind, code, count, body, age } => {
                let slot = slot % 4;
                let generation = generations[usize::from(slot)].wrapping_add_signed(age.into());
                let tag = u64::from(generation) << 32 | u64::from(slot);
                let header = MessageHeader {
                    kind,
                    code,
                    tag,
                    count: count.into(),
                    body: body.into(),
                    ..MessageHeader::default()
                };
                ended = heard(&mut client, &header);
            }
            Move::Pass(nanos) => {
                now = Moment(now.0 + u64::from(nanos));
                if let Some(expired) = client.poll_expired(now) {
                    let (ExpiredOperation::Quiet { slot }
                    | ExpiredOperation::Sending { slot }
                    | ExpiredOperation::Receiving { slot }) = expired;
                    ended = Some(slot);
                }
            }
            Move::Finish(slot) => ended = Some(u32::from(slot) % 5),
            Move::Sent(_) => {}
        }
        if let Some(slot) = ended
            && let Some(finished) = client.finish(slot)
        {
            sending.retain(|sent| *sent != slot);
            assert!(open.remove(&finished.carried), "ended twice");
        }
        assert_eq!(client.in_flight(), open.len());
    }
    while let Some(slot) = client.any() {
        assert!(open.remove(&client.finish(slot).unwrap().carried));
    }
    assert!(open.is_empty());
});

/// The operation that an answer ends.
fn heard(client: &mut ClientConversation<usize>, header: &MessageHeader) -> Option<u32> {
    match client.on_header(header) {
        Ok(ReplyEvent::Done { slot } | ReplyEvent::Failed { slot, .. }) => Some(slot),
        // Its bytes are on their way; they may never come.
        Ok(ReplyEvent::Pages { .. } | ReplyEvent::Part { .. } | ReplyEvent::Stale) | Err(_) => None,
    }
}
