//! Answers: what a lying server may say to any question.
#![no_main]

use farfield_core::wire::{
    ExposeReply, HEADER_BYTES, MapReply, MessageHeader, Reply, StationReply, WireReply, encode_answer, encode_expose,
    encode_map, encode_stat, encode_station,
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(Some(header)) = MessageHeader::decode(bytes) else { return };
    let Ok(answer) = WireReply::decode(&header, &bytes[HEADER_BYTES..]) else { return };
    let mut again = Vec::new();
    match answer.reply {
        Reply::Map(map) => {
            assert!((1..=MapReply::LAYERS_MAX).contains(&map.layers_total));
            assert!(map.first_layer + map.layers <= map.layers_total && map.layers <= MapReply::LAYERS_AT_ONCE);
            encode_map(answer.tag, &map, &mut again);
        }
        Reply::Stat(stat) => encode_stat(answer.tag, &stat, &mut again),
        Reply::Station => {
            let station = StationReply::decode(&bytes[HEADER_BYTES..]).unwrap();
            encode_station(answer.tag, &station, &mut again);
        }
        Reply::Expose => {
            let windows = ExposeReply::decode(&bytes[HEADER_BYTES..]).unwrap();
            assert!((1..=MapReply::LAYERS_MAX).contains(&windows.layers_total));
            assert!(windows.first_layer + windows.layers().len() as u32 <= windows.layers_total);
            encode_expose(answer.tag, &windows, windows.layers(), &mut again);
        }
        Reply::Answer { steps } => encode_answer(answer.tag, steps, &bytes[HEADER_BYTES..], &mut again),
        _ => return,
    }
    let header = MessageHeader::decode(&again).unwrap().unwrap();
    assert_eq!(WireReply::decode(&header, &again[HEADER_BYTES..]), Ok(answer));
});
