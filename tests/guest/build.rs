//! A guest's stack lies in its memory, which each call gets anew: it is as large as functions need it, and not a megabyte.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_FAMILY").is_ok_and(|family| family == "wasm") {
        println!("cargo:rustc-link-arg-cdylib=-zstack-size=32768");
    }
}
