//! What the API server and the scheduler of Kubernetes send: any bytes are understood, or refused.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| farfield_cluster::gate::kubernetes::check_message(bytes));
