//! The server's first answer: welcome or refusal.
#![no_main]

use farfield_core::wire::{BATCH_PAGES_LIMIT, ConnectionRefusal, HEADER_BYTES, MessageHeader, Welcome};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(Some(header)) = MessageHeader::decode(bytes) else { return };
    match Welcome::decode(&header, &bytes[HEADER_BYTES..]) {
        Err(_) => {}
        Ok(Err(refusal)) => assert!(refusal.text.len() <= ConnectionRefusal::TEXT_BYTES_MAX),
        Ok(Ok(welcome)) => {
            assert!((1..=BATCH_PAGES_LIMIT).contains(&welcome.batch_pages_max));
            assert!(welcome.in_flight_max > 0 && welcome.session.0 != 0);
            let mut again = Vec::new();
            welcome.encode(&mut again);
            let decoded = Welcome::decode(&MessageHeader::decode(&again).unwrap().unwrap(), &again[HEADER_BYTES..]);
            assert_eq!(decoded, Ok(Ok(welcome)));
        }
    }
});
