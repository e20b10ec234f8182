//! The server's first answer: welcome or refusal.
#![no_main]

use farfield_core::wire::{BATCH_PAGES_LIMIT, HEAD_BYTES, Head, Refusal, Welcome};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(Some(head)) = Head::decode(bytes) else { return };
    match Welcome::decode(&head, &bytes[HEAD_BYTES..]) {
        Err(_) => {}
        Ok(Err(refusal)) => assert!(refusal.text.len() <= Refusal::TEXT_BYTES_MAX),
        Ok(Ok(welcome)) => {
            assert!((1..=BATCH_PAGES_LIMIT).contains(&welcome.batch_pages_max));
            assert!(welcome.in_flight_max > 0 && welcome.session.0 != 0);
            let mut again = Vec::new();
            welcome.encode(&mut again);
            let decoded = Welcome::decode(&Head::decode(&again).unwrap().unwrap(), &again[HEAD_BYTES..]);
            assert_eq!(decoded, Ok(Ok(welcome)));
        }
    }
});
