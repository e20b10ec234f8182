//! Pool URLs, which people and their scripts write: any text is understood, or refused with a place in it, and what is understood can be said again.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    farfield_pool::check_url(text);
});
