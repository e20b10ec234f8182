//! What guest and host say to each other: any bytes are understood and said again the same way, or refused.
#![no_main]

use farfield_sandbox::abi::{Begin, GuestMessage, HostReply};
use libfuzzer_sys::fuzz_target;

fn check<T: PartialEq + std::fmt::Debug + serde::Serialize + serde::de::DeserializeOwned>(bytes: &[u8]) {
    if let Ok((value, _)) = postcard::take_from_bytes::<T>(bytes) {
        let again = postcard::to_stdvec(&value).expect("what was said can be said again");
        assert_eq!(postcard::from_bytes::<T>(&again).expect("and understood"), value);
    }
}

fuzz_target!(|bytes: &[u8]| {
    check::<GuestMessage>(bytes);
    check::<HostReply>(bytes);
    check::<Begin>(bytes);
});
