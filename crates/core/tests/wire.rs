//! Guards against messages that change on their way, and against decoders that panic, over-read or accept what
//! no encoder makes. The same decoders are fuzzed under `fuzz/`; here every change is checked in a second.

use farfield_core::geometry::PAGE_BYTES;
use farfield_core::session::{ConnectionLimits, ServerAction, ServerConversation};
use farfield_core::wire::*;
use farfield_core::{Incarnation, PageId, RegionId, part_checksum};
use proptest::prelude::*;

fn split(frame: &[u8]) -> (MessageHeader, &[u8]) {
    let header = MessageHeader::decode(frame).unwrap().unwrap();
    assert_eq!(frame.len(), header.frame_bytes(), "a frame is as long as its head says");
    (header, &frame[HEADER_BYTES..])
}

fn header() -> impl Strategy<Value = MessageHeader> {
    let small = (0u32..=BODY_BYTES_LIMIT as u32, any::<(u8, u8, u16)>(), any::<(u64, u32, u32, u64, u64)>());
    small.prop_map(|(body, (kind, flags, code), (tag, deadline_us, count, region, page))| MessageHeader {
        body,
        kind,
        flags,
        code,
        tag,
        deadline_us,
        count,
        region,
        page,
    })
}

const NAMES: [&str; 3] = ["f", "ff.tally", "a name of sixty-four bytes, which is the longest that can be had"];
const ARGUMENT: [u8; 300] = [0xA5; 300];

/// Requests, their page bytes all equal to one byte.
fn request() -> impl Strategy<Value = (Request<'static>, u8)> {
    let (region, page) = (any::<u64>().prop_map(RegionId), any::<u64>().prop_map(PageId));
    let run = (region.clone(), page, any::<u32>());
    prop_oneof![
        any::<u64>().prop_map(|pages| Request::CreateRegion { pages }),
        region.clone().prop_map(|region| Request::DropRegion { region }),
        run.clone().prop_map(|(region, page, count)| Request::Read { region, page, count }),
        run.clone().prop_map(|(region, page, count)| Request::Discard { region, page, count }),
        (run, 0..PAGE_BYTES, 1..=PAGE_BYTES).prop_map(|((region, page, _), offset, len)| {
            let part = PagePart::new(offset, len.min(PAGE_BYTES - offset)).unwrap();
            Request::ReadPart { region, page, part }
        }),
        region.clone().prop_map(|region| Request::CloneRegion { region }),
        any::<u128>().prop_map(|ticket| Request::ClaimRegion { ticket }),
        Just(Request::Stat),
        Just(Request::Ping),
        (region.clone(), any::<u32>()).prop_map(|(region, first_layer)| Request::MapRegion { region, first_layer }),
        (region.clone(), any::<u32>()).prop_map(|(region, pages)| Request::Reserve { region, pages }),
        (region, any::<u32>()).prop_map(|(region, pages)| Request::Release { region, pages }),
        Just(Request::Station),
        (any::<u64>().prop_map(RegionId), any::<u32>())
            .prop_map(|(region, first_layer)| Request::Expose { region, first_layer }),
        (any::<u64>().prop_map(RegionId), any::<u32>(), any::<u32>(), 0..NAMES.len(), 0..=ARGUMENT.len()).prop_map(
            |(region, steps_max, version, name, len)| {
                let call = CallBody { name: NAMES[name], version, argument: &ARGUMENT[..len] };
                Request::Call { region, steps_max, call }
            }
        ),
        Just(Request::Bye),
    ]
    .prop_flat_map(|request| (Just(request), any::<u8>()))
}

/// Everything that reads bytes from the other side, on bytes that may be anything.
fn feed(bytes: &[u8]) {
    let Ok(Some(header)) = MessageHeader::decode(bytes) else { return };
    let body = &bytes[HEADER_BYTES..];
    let _ = Hello::decode(&header, body);
    let _ = Welcome::decode(&header, body);
    let _ = WireReply::decode(&header, body);
    let _ = part_reply(body);
    if let Some(call) = CallBody::decode(body) {
        assert!(call.is_sendable() && call.body_bytes() == body.len());
    }
    let _ = StationReply::decode(body);
    if let Some(reply) = ExposeReply::decode(body) {
        assert!(reply.first_layer + reply.layers().len() as u32 <= reply.layers_total);
    }
    if let Ok(WireRequest { request: Request::Write { pages, .. }, .. }) = WireRequest::decode(&header, body) {
        assert_eq!(pages.iter().count(), pages.count() as usize);
        assert_eq!(pages.bytes().len(), pages.count() as usize * PAGE_BYTES);
    }
    for asked in [0, 1, 63, 64, 65, header.count, u32::MAX] {
        let Ok(prefix) = ReadReply::prefix_bytes(&header, asked) else { continue };
        assert!(prefix <= header.body as usize);
        let Some(prefix) = body.get(..prefix) else { continue };
        let Ok(reply) = ReadReply::decode(&header, asked, prefix) else { continue };
        let present = (0..asked).filter(|index| reply.is_present(*index)).count();
        assert_eq!(present, reply.present() as usize);
        assert_eq!(prefix.len() + present * PAGE_BYTES, header.body as usize);
        (0..reply.present()).for_each(|nth| {
            reply.sum_of_present(nth);
        });
    }
}

proptest! {
    #[test]
    fn heads_survive(header in header()) {
        prop_assert_eq!(MessageHeader::decode(&header.encode()), Ok(Some(header)));
        for short in 0..HEADER_BYTES {
            prop_assert_eq!(MessageHeader::decode(&header.encode()[..short]), Ok(None));
        }
    }

    #[test]
    fn requests_survive((request, _) in request(), tag: u64, background: bool, deadline in 0u32..) {
        let deadline = (deadline != 0).then(|| core::time::Duration::from_micros(deadline.into()));
        let sent = WireRequest { tag, background, deadline, request };
        let mut frame = Vec::new();
        encode_request(&sent, &mut frame);
        let (header, body) = split(&frame);
        prop_assert_eq!(WireRequest::decode(&header, body), Ok(sent));
    }

    #[test]
    fn writes_survive(count in 1u32..6, byte: u8, sums in prop::collection::vec(any::<u64>(), 5), page: u64) {
        let header = MessageHeader {
            kind: MessageKind::Write as u8, count, page, body: write_body_bytes(count) as u32, ..MessageHeader::default()
        };
        let mut body: Vec<u8> = sums[..count as usize].iter().flat_map(|sum| sum.to_le_bytes()).collect();
        body.resize(write_body_bytes(count), byte);
        let decoded = WireRequest::decode(&header, &body).unwrap();
        prop_assert_eq!(decoded.header(), header);
        let Request::Write { pages, .. } = decoded.request else { panic!("not a write") };
        prop_assert_eq!(pages.count(), count);
        for (index, (sum, bytes)) in pages.iter().enumerate() {
            prop_assert_eq!(sum, sums[index]);
            prop_assert_eq!(pages.sum(index as u32), sums[index]);
            prop_assert!(bytes.len() == PAGE_BYTES && bytes.iter().all(|each| *each == byte));
        }
        for wrong in [body.len() - 1, body.len() - PAGE_BYTES, 0] {
            prop_assert!(WireRequest::decode(&header, &body[..wrong]).is_err());
        }
    }

    /// A part is one of one version of one page, at one place: its checksum says so, wherever its
    /// header comes from.
    #[test]
    fn parts_say_whose_they_are(
        page in prop::collection::vec(any::<u8>(), PAGE_BYTES), page_sum: u64, other_sum: u64, offset in 0..PAGE_BYTES - 64,
        elsewhere in 0..PAGE_BYTES - 64, len in 1usize..=64, tag: u64,
    ) {
        let part = PagePart::new(offset, len).unwrap();
        let mut frame = Vec::new();
        encode_part(tag, part, page_sum, &page[part.range()], &mut frame);
        let (header, body) = split(&frame);
        prop_assert_eq!((header.tag, header.page, body.len()), (tag, page_sum, part_body_bytes(part)));
        let (sum, bytes) = part_reply(body).unwrap();
        prop_assert_eq!(bytes, &page[part.range()]);
        prop_assert_eq!(sum, part_checksum(part, bytes, header.page));
        prop_assert_eq!(sum == part_checksum(part, bytes, other_sum), other_sum == page_sum);
        let other = PagePart::new(elsewhere, len).unwrap();
        prop_assert_eq!(sum == part_checksum(other, bytes, header.page), elsewhere == offset);
    }

    #[test]
    fn hellos_survive(
        versions: (u16, u16), features: u64, secret: u128, token in prop::collection::vec(any::<u8>(), 0..=256),
        name in "\\PC{0,32}",
    ) {
        let (version_min, version_max) = (versions.0.min(versions.1), versions.0.max(versions.1));
        let session = (secret != 0).then_some(SessionSecret(secret));
        let hello = Hello { version_min, version_max, features, session, token: &token, client_name: &name };
        let mut frame = Vec::new();
        hello.encode(&mut frame);
        let (header, body) = split(&frame);
        prop_assert_eq!(Hello::decode(&header, body), Ok(hello));
        prop_assert!(!format!("{hello:?}").contains(&format!("{token:?}")), "the token must not be printed");
        // A later version may add fields at the end.
        let mut longer = body.to_vec();
        longer.extend([1, 2, 3]);
        prop_assert_eq!(Hello::decode(&header, &longer), Ok(hello));
        for short in 0..body.len() {
            prop_assert!(Hello::decode(&header, &body[..short]).is_err());
        }
    }

    #[test]
    fn welcomes_and_refusals_survive(
        numbers: (u16, u32, u64, u64), secret in 1u128.., batch in 1..=BATCH_PAGES_LIMIT, in_flight in 1u32..,
        code: u16, text in "\\PC{0,300}",
    ) {
        let welcome = Welcome {
            version: numbers.0, lease_ms: numbers.1, features: numbers.2, incarnation: Incarnation(numbers.3),
            session: SessionSecret(secret), batch_pages_max: batch, in_flight_max: in_flight,
        };
        let mut frame = Vec::new();
        welcome.encode(&mut frame);
        let (header, body) = split(&frame);
        prop_assert_eq!(Welcome::decode(&header, body), Ok(Ok(welcome)));
        let refusal = ConnectionRefusal {
            code: RefuseCode::from_number(code), version_min: numbers.0, version_max: code, text: &text,
        };
        let mut frame = Vec::new();
        encode_refusal(&refusal, &mut frame);
        let (header, body) = split(&frame);
        let decoded = Welcome::decode(&header, body).unwrap().unwrap_err();
        prop_assert!(text.starts_with(decoded.text) && decoded.text.len() >= text.len().min(253));
        prop_assert_eq!(ConnectionRefusal { text: "", ..decoded }, ConnectionRefusal { text: "", ..refusal });
    }

    #[test]
    fn answers_survive(tag: u64, a: u64, b: u64, secret: u128, code: u16, words: [u64; 13], layers in 1u32..=128) {
        let stat = Stat {
            uptime_ms: words[0], capacity_pages: words[1], used_pages: words[2], reserved_pages: words[3],
            regions: words[4], sessions: words[5], connections: words[6], read_pages: words[7],
            written_pages: words[8], discarded_pages: words[9], received_bytes: words[10], sent_bytes: words[11],
            failed_requests: words[12],
        };
        let map = MapReply { pages: a, generation: b, layers_total: 255, first_layer: 255 - layers, layers };
        let mut frame = Vec::new();
        let mut check = |encode: &dyn Fn(&mut Vec<u8>), kind: Option<MessageKind>, reply: Reply| {
            frame.clear();
            encode(&mut frame);
            let (header, body) = split(&frame);
            assert_eq!(WireReply::decode(&header, body), Ok(WireReply { tag, kind, reply }));
        };
        check(&|out| encode_ok(tag, MessageKind::Write, out), Some(MessageKind::Write), Reply::Done);
        let failed = Reply::Failed { code: ErrorCode::from_number(code), page: a };
        check(&|out| encode_error(tag, ErrorCode::from_number(code), a, out), None, failed);
        let created = Reply::Created { region: RegionId(a) };
        check(&|out| encode_created(tag, RegionId(a), out), Some(MessageKind::CreateRegion), created);
        let claimed = Reply::Claimed { region: RegionId(a), pages: b };
        check(&|out| encode_claimed(tag, RegionId(a), b, out), Some(MessageKind::ClaimRegion), claimed);
        check(&|out| encode_ticket(tag, secret, out), Some(MessageKind::CloneRegion), Reply::Ticket { secret });
        check(&|out| encode_stat(tag, &stat, out), Some(MessageKind::Stat), Reply::Stat(stat));
        check(&|out| encode_map(tag, &map, out), Some(MessageKind::MapRegion), Reply::Map(map));
    }

    #[test]
    fn answers_of_functions_survive(tag: u64, steps: u32, bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
        let mut frame = Vec::new();
        encode_answer(tag, steps, &bytes, &mut frame);
        let (header, body) = split(&frame);
        let answer = WireReply { tag, kind: Some(MessageKind::Call), reply: Reply::Answer { steps } };
        prop_assert_eq!(WireReply::decode(&header, body), Ok(answer));
        prop_assert_eq!(body, &bytes[..]);
    }

    #[test]
    fn answers_about_a_fabric_survive(
        tag: u64, provider in "[a-z;_]{0,32}", address in prop::collection::vec(any::<u8>(), 0..=256),
        pages: u64, generation: u64, keys in prop::collection::vec(any::<(u64, u64)>(), 2..=58), more in 0u32..100,
    ) {
        let station = StationReply { provider: &provider, address: &address };
        let mut frame = Vec::new();
        encode_station(tag, &station, &mut frame);
        let (header, body) = split(&frame);
        let reply = WireReply { tag, kind: Some(MessageKind::Station), reply: Reply::Station };
        prop_assert_eq!(WireReply::decode(&header, body), Ok(reply));
        prop_assert_eq!(StationReply::decode(body), Some(station));
        prop_assert_eq!(StationReply::decode(&body[..body.len() - 1]), None);

        let windows: Vec<RemoteWindow> = keys.iter().map(|(key, base)| RemoteWindow { key: *key, base: *base }).collect();
        let layers_total = (more + windows.len() as u32 - 2).max(1);
        let first_layer = layers_total + 2 - windows.len() as u32;
        let reply = ExposeReply::new(pages, generation, layers_total, first_layer, [windows[0], windows[1]]);
        let mut frame = Vec::new();
        encode_expose(tag, &reply, windows[2..].iter().copied(), &mut frame);
        let (header, body) = split(&frame);
        let answer = WireReply { tag, kind: Some(MessageKind::Expose), reply: Reply::Expose };
        prop_assert_eq!(WireReply::decode(&header, body), Ok(answer));
        let decoded = ExposeReply::decode(body).unwrap();
        prop_assert!(decoded.layers().eq(windows[2..].iter().copied()));
        let told = |reply: &ExposeReply<'_>| {
            (reply.pages, reply.generation, reply.layers_total, reply.first_layer, reply.page_map, reply.sums)
        };
        prop_assert_eq!(told(&decoded), told(&reply));
        prop_assert_eq!(ExposeReply::decode(&body[..body.len() - 1]), None);
    }

    #[test]
    fn read_answers_survive(present in prop::collection::vec(any::<bool>(), 1..200), seed: u64) {
        let count = present.len() as u32;
        let sum = |index: u32| seed.wrapping_mul(u64::from(index) + 1);
        let indices = || (0..count).filter(|index| present[*index as usize]);
        let mut frame = Vec::new();
        encode_read(9, count, indices().map(|index| (index, sum(index))), &mut frame);
        let header = MessageHeader::decode(&frame).unwrap().unwrap();
        let prefix = ReadReply::prefix_bytes(&header, count).unwrap();
        prop_assert_eq!(frame.len(), HEADER_BYTES + prefix);
        prop_assert_eq!(prefix, read_prefix_bytes(count, indices().count() as u32));
        let reply = ReadReply::decode(&header, count, &frame[HEADER_BYTES..]).unwrap();
        for index in 0..count {
            prop_assert_eq!(reply.is_present(index), present[index as usize]);
        }
        for (nth, index) in indices().enumerate() {
            prop_assert_eq!(reply.sum_of_present(nth as u32), sum(index));
        }
        prop_assert!(ReadReply::prefix_bytes(&header, count + 1).is_err(), "an answer to another question");
    }

    #[test]
    fn garbage_is_refused_or_understood_but_never_more(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        feed(&bytes);
    }

    #[test]
    fn nearly_right_messages_are_refused_or_understood(
        mut header in header(), kind in 0usize..MessageKind::ALL.len(), answer: bool,
        body in prop::collection::vec(any::<u8>(), 0..200), magic: bool,
    ) {
        let kind = MessageKind::ALL[kind];
        header.kind = if answer { kind.answer() } else { kind as u8 };
        header.body = body.len() as u32;
        header.count %= 300;
        let mut bytes = header.encode().to_vec();
        bytes.extend(if magic { MAGIC.as_slice() } else { &[] });
        bytes.extend(&body);
        feed(&bytes);
    }

    #[test]
    fn a_conversation_takes_its_bytes_in_any_pieces(
        requests in prop::collection::vec(request(), 1..20), cuts in prop::collection::vec(1usize..200, 1..50),
    ) {
        let mut stream = Vec::new();
        let hello = Hello {
            version_min: 1, version_max: 9, features: 0, session: None, token: b"t", client_name: "n",
        };
        hello.encode(&mut stream);
        for (tag, (request, _)) in requests.iter().enumerate() {
            let request = WireRequest { tag: tag as u64, background: false, deadline: None, request: *request };
            encode_request(&request, &mut stream);
        }
        let mut conversation = ServerConversation::new();
        let (mut received, mut seen) = (Vec::new(), 0);
        let mut cuts = cuts.iter().cycle();
        while !stream.is_empty() {
            received.extend(stream.drain(..stream.len().min(*cuts.next().unwrap())));
            loop {
                let used = match conversation.step(&received) {
                    ServerAction::Need { bytes } => {
                        assert!(bytes > received.len(), "it needs what it has");
                        break;
                    }
                    ServerAction::Hello { hello, version, used } => {
                        assert_eq!((hello.token, version), (&b"t"[..], Some(1)));
                        conversation.on_welcome(&welcome());
                        used
                    }
                    ServerAction::Request { request, used } => {
                        assert_eq!(request.tag, seen);
                        assert_eq!(request.request, requests[seen as usize].0);
                        seen += 1;
                        conversation.on_answered();
                        used
                    }
                    ServerAction::Fail { tag, code, used } => {
                        assert!(matches!(requests[seen as usize].0, Request::Read { count, .. } if count == 0 || count > 64));
                        assert!(matches!(code, ErrorCode::TooMuch | ErrorCode::BadRequest));
                        assert_eq!(tag, seen);
                        seen += 1;
                        used
                    }
                    ServerAction::Broken { error, .. } => panic!("{error}"),
                };
                received.drain(..used);
            }
        }
        assert_eq!(seen as usize, requests.len());
    }
}

fn welcome() -> Welcome {
    let ConnectionLimits { batch_pages_max, in_flight_max } =
        ConnectionLimits { batch_pages_max: 64, in_flight_max: 4 };
    Welcome {
        version: 1,
        lease_ms: 1,
        features: 0,
        incarnation: Incarnation(1),
        session: SessionSecret(1),
        batch_pages_max,
        in_flight_max,
    }
}

fn open_conversation() -> ServerConversation {
    let mut conversation = ServerConversation::new();
    conversation.on_welcome(&welcome());
    conversation
}

fn frame(request: Request<'_>) -> Vec<u8> {
    let mut frame = Vec::new();
    encode_request(&WireRequest { tag: 5, background: false, deadline: None, request }, &mut frame);
    frame
}

#[test]
fn a_stranger_is_noticed_by_the_first_forty_bytes() {
    let http = b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n";
    assert!(matches!(ServerConversation::new().step(http), ServerAction::Broken { .. }));
    // A request before the handshake, and a greeting that would never end.
    assert!(matches!(ServerConversation::new().step(&frame(Request::Ping)), ServerAction::Broken { .. }));
    let endless = MessageHeader { kind: MessageKind::Hello as u8, body: 1 << 20, ..MessageHeader::default() };
    assert!(matches!(ServerConversation::new().step(&endless.encode()), ServerAction::Broken { .. }));
}

#[test]
fn a_second_greeting_breaks_the_conversation_for_good() {
    let mut conversation = open_conversation();
    let mut again = Vec::new();
    let hello = Hello { version_min: 1, version_max: 1, features: 0, session: None, token: b"", client_name: "" };
    hello.encode(&mut again);
    assert!(matches!(conversation.step(&again), ServerAction::Broken { .. }));
    assert!(matches!(conversation.step(&frame(Request::Ping)), ServerAction::Broken { .. }));
}

#[test]
fn more_than_agreed_is_an_error_of_the_request_or_of_the_connection() {
    let mut conversation = open_conversation();
    let region = RegionId(1);
    let read = frame(Request::Read { region, page: PageId(0), count: 65 });
    assert!(matches!(conversation.step(&read), ServerAction::Fail { tag: 5, code: ErrorCode::TooMuch, .. }));
    for _ in 0..4 {
        assert!(matches!(conversation.step(&frame(Request::Ping)), ServerAction::Request { .. }));
    }
    assert_eq!(conversation.in_flight(), 4);
    assert!(matches!(conversation.step(&frame(Request::Ping)), ServerAction::Fail { code: ErrorCode::TooMuch, .. }));
    conversation.on_answered();
    assert!(matches!(conversation.step(&frame(Request::Ping)), ServerAction::Request { .. }));
    // A longer write than agreed would have to be received before it could be refused.
    let header = MessageHeader {
        kind: MessageKind::Write as u8,
        count: 65,
        body: write_body_bytes(65) as u32,
        ..MessageHeader::default()
    };
    assert!(matches!(conversation.step(&header.encode()), ServerAction::Broken { .. }));
}

#[test]
fn a_request_of_a_later_version_is_unsupported_and_the_conversation_goes_on() {
    let mut conversation = open_conversation();
    let later = MessageHeader { kind: 0x55, tag: 8, body: 3, ..MessageHeader::default() };
    let mut bytes = later.encode().to_vec();
    bytes.extend([1, 2, 3]);
    let ServerAction::Fail { tag: 8, code: ErrorCode::Unsupported, used } = conversation.step(&bytes) else {
        panic!("not refused")
    };
    assert_eq!(used, bytes.len());
    assert!(matches!(conversation.step(&frame(Request::Ping)), ServerAction::Request { .. }));
}
