//! Guards against operations that are lost, end twice, overtake what they must not, or wait for ever.

use core::time::Duration;
use farfield_core::session::{ClientConversation, ExpiredOperation, PageOperation, ReplyEvent};
use farfield_core::time::Moment;
use farfield_core::wire::*;
use farfield_core::{PageId, RegionId};
use proptest::prelude::*;
use std::collections::BTreeSet;

const SLOTS: u32 = 8;
const SECOND: Duration = Duration::from_secs(1);

fn client(in_flight_max: u32, background_pages_max: u32) -> ClientConversation<u64> {
    ClientConversation::new(RegionId(3), SLOTS, in_flight_max, background_pages_max)
}

fn read(page: u64, count: u32) -> PageOperation {
    PageOperation::Read { page: PageId(page), count }
}

fn answer_to(header: &MessageHeader) -> MessageHeader {
    let body = match MessageKind::of_request(header.kind) {
        Some(MessageKind::Read) => present_words(header.count) as u32 * 8,
        Some(MessageKind::ReadPart) => 8 + (header.count & 0xFFFF),
        _ => 0,
    };
    MessageHeader {
        kind: header.kind | MessageKind::ANSWER,
        tag: header.tag,
        count: header.count,
        body,
        ..MessageHeader::default()
    }
}

#[test]
fn demand_overtakes_queued_background() {
    let mut client = client(64, 1000);
    for number in 0..3 {
        client.submit(Moment(0), read(number, 1), true, SECOND, number).unwrap();
    }
    client.submit(Moment(0), read(9, 1), false, SECOND, 9).unwrap();
    let order: Vec<u64> = std::iter::from_fn(|| client.poll_send(Moment(0))).map(|sent| sent.header.page).collect();
    assert_eq!(order, [9, 0, 1, 2]);
}

#[test]
fn only_so_many_background_pages_are_under_way_and_demand_does_not_wait_for_them() {
    let mut client = client(64, 10);
    for number in 0..4 {
        client.submit(Moment(0), read(number, 6), true, SECOND, number).unwrap();
    }
    let first = client.poll_send(Moment(0)).unwrap();
    assert!(client.poll_send(Moment(0)).is_none());
    client.submit(Moment(0), read(9, 60), false, SECOND, 9).unwrap();
    assert_eq!(client.poll_send(Moment(0)).unwrap().header.page, 9);
    client.on_sent(first.slot);
    client.finish(first.slot).unwrap();
    assert_eq!(client.poll_send(Moment(0)).unwrap().header.page, 1);
    // One that is larger than the window alone still goes when nothing else is under way.
    let mut alone = self::client(64, 10);
    alone.submit(Moment(0), read(0, 60), true, SECOND, 0).unwrap();
    assert!(alone.poll_send(Moment(0)).is_some());
}

#[test]
fn the_server_is_never_sent_more_than_it_takes() {
    let mut client = client(2, 1000);
    for number in 0..4 {
        client.submit(Moment(0), read(number, 1), false, SECOND, number).unwrap();
    }
    let sent = [client.poll_send(Moment(0)).unwrap(), client.poll_send(Moment(0)).unwrap()];
    assert!(!client.wants_to_send());
    client.on_sent(sent[1].slot);
    assert!(matches!(client.on_header(&answer_to(&sent[1].header)), Ok(ReplyEvent::Pages { .. })));
    client.finish(sent[1].slot).unwrap();
    assert!(client.wants_to_send());
}

#[test]
fn a_late_answer_is_skipped_and_a_made_up_one_breaks_the_connection() {
    let mut client = client(8, 8);
    client.submit(Moment(0), read(7, 1), false, Duration::from_nanos(100), 1).unwrap();
    let sent = client.poll_send(Moment(10)).unwrap();
    client.on_sent(sent.slot);
    assert_eq!(client.poll_expired(Moment(99)), None);
    assert_eq!(client.poll_expired(Moment(100)), Some(ExpiredOperation::Quiet { slot: sent.slot }));
    assert_eq!(client.finish(sent.slot).unwrap().carried, 1);
    assert_eq!(client.on_header(&answer_to(&sent.header)), Ok(ReplyEvent::Stale));
    let future = MessageHeader { tag: sent.header.tag + (7 << 32), ..answer_to(&sent.header) };
    assert_eq!(client.on_header(&future), Err(WireError::Unasked));
    let nowhere = MessageHeader { tag: 99, ..answer_to(&sent.header) };
    assert_eq!(client.on_header(&nowhere), Err(WireError::Unasked));
}

#[test]
fn an_answer_of_another_kind_or_to_an_unsent_question_breaks_the_connection() {
    let mut client = client(8, 8);
    client.submit(Moment(0), read(7, 2), false, SECOND, 1).unwrap();
    let sent = client.poll_send(Moment(0)).unwrap();
    assert_eq!(client.on_header(&answer_to(&sent.header)), Err(WireError::Unasked), "not sent yet");
    client.on_sent(sent.slot);
    let other = MessageHeader { kind: MessageKind::Write.answer(), body: 0, ..answer_to(&sent.header) };
    assert!(client.on_header(&other).is_err());
    let fewer = MessageHeader { count: 1, ..answer_to(&sent.header) };
    assert!(client.on_header(&fewer).is_err());
    assert!(matches!(client.on_header(&answer_to(&sent.header)), Ok(ReplyEvent::Pages { asked: 2, prefix: 8, .. })));
    assert_eq!(client.on_header(&answer_to(&sent.header)), Err(WireError::Unasked), "twice");
}

#[derive(Clone, Debug)]
enum Move {
    Submit { background: bool, kind: u8, count: u32, wait: u64 },
    Send,
    Sent { nth: usize },
    Answer { nth: usize, fail: bool },
    Pass { nanos: u64 },
}

fn step() -> impl Strategy<Value = Move> {
    prop_oneof![
        (any::<bool>(), 0u8..4, 1u32..20, 1u64..300).prop_map(|(background, kind, count, wait)| Move::Submit {
            background,
            kind,
            count,
            wait
        }),
        Just(Move::Send),
        any::<usize>().prop_map(|nth| Move::Sent { nth }),
        (any::<usize>(), any::<bool>()).prop_map(|(nth, fail)| Move::Answer { nth, fail }),
        (1u64..100).prop_map(|nanos| Move::Pass { nanos }),
    ]
}

proptest! {
    #[test]
    fn every_operation_ends_exactly_once(steps in prop::collection::vec(step(), 1..300)) {
        let mut client = client(5, 30);
        let mut now = Moment(0);
        let mut open = BTreeSet::new();
        let (mut sending, mut waiting) = (Vec::new(), Vec::new());
        for (number, step) in steps.into_iter().enumerate() {
            match step {
                Move::Submit { background, kind, count, wait } => {
                    let page = PageId(number as u64);
                    let call = match kind {
                        0 => PageOperation::Read { page, count },
                        1 => PageOperation::Write { page, count },
                        2 => PageOperation::ReadPart { page, part: PagePart::new(count as usize, 64).unwrap() },
                        _ => PageOperation::Discard { page, count },
                    };
                    let wait = Duration::from_nanos(wait);
                    match client.submit(now, call, background, wait, number as u64) {
                        Ok(()) => prop_assert!(open.insert(number as u64)),
                        Err(back) => {
                            prop_assert_eq!(back, number as u64);
                            prop_assert_eq!(client.in_flight(), SLOTS as usize);
                        }
                    }
                }
                Move::Send => {
                    if let Some(sent) = client.poll_send(now) {
                        prop_assert_eq!(sent.header.region, 3);
                        sending.push(sent);
                    }
                }
                Move::Sent { nth } if !sending.is_empty() => {
                    let sent = sending.remove(nth % sending.len());
                    client.on_sent(sent.slot);
                    waiting.push(sent);
                }
                Move::Answer { nth, fail } if !waiting.is_empty() => {
                    let sent = waiting.remove(nth % waiting.len());
                    let header = match fail {
                        true => MessageHeader { kind: MessageKind::ERROR, code: 3, tag: sent.header.tag, ..MessageHeader::default() },
                        false => answer_to(&sent.header),
                    };
                    match client.on_header(&header).unwrap() {
                        ReplyEvent::Pages { slot, .. }
                        | ReplyEvent::Part { slot, .. }
                        | ReplyEvent::Done { slot }
                        | ReplyEvent::Failed { slot, .. } => {
                            let finished = client.finish(slot).unwrap();
                            prop_assert_eq!(finished.call, sent.call);
                            prop_assert!(open.remove(&finished.carried), "ended twice");
                        }
                        ReplyEvent::Stale => panic!("nothing that waits is stale"),
                    }
                }
                Move::Pass { nanos } => {
                    now = Moment(now.0 + nanos);
                    while let Some(expired) = client.poll_expired(now) {
                        let (ExpiredOperation::Quiet { slot } | ExpiredOperation::Sending { slot } | ExpiredOperation::Receiving { slot }) = expired;
                        prop_assert_eq!(
                            matches!(expired, ExpiredOperation::Sending { .. }),
                            sending.iter().any(|sent| sent.slot == slot)
                        );
                        sending.retain(|sent| sent.slot != slot);
                        waiting.retain(|sent| sent.slot != slot);
                        let finished = client.finish(slot).unwrap();
                        prop_assert!(open.remove(&finished.carried), "ended twice");
                    }
                    prop_assert!(client.next_deadline() > now);
                }
                Move::Sent { .. } | Move::Answer { .. } => {}
            }
            prop_assert_eq!(client.in_flight(), open.len());
            prop_assert!(sending.len() + waiting.len() <= 5);
        }
        while let Some(slot) = client.any() {
            prop_assert!(open.remove(&client.finish(slot).unwrap().carried));
        }
        prop_assert!(open.is_empty(), "lost: {:?}", open);
    }
}
