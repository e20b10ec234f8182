//! Linker settings of the preload library.

fn main() {
    // Initialised before every other library, so that no program code runs before the handlers are in place.
    println!("cargo:rustc-link-arg-cdylib=-Wl,-z,initfirst");
    // All symbols are bound when the library is loaded: the dynamic loader must not run inside a handler.
    println!("cargo:rustc-link-arg-cdylib=-Wl,-z,now");
}
