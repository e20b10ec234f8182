//! Finds libfabric's headers and compiles the functions that it has there only. The library is
//! loaded when it is needed.

fn main() {
    println!("cargo:rerun-if-changed=src/shim.c");
    #[cfg(feature = "libfabric")]
    compile();
}

#[cfg(feature = "libfabric")]
fn compile() {
    let found = pkg_config::Config::new().atleast_version("1.17").cargo_metadata(false).probe("libfabric");
    let library = found.unwrap_or_else(|error| {
        panic!(
            "the feature `fabric` needs libfabric 1.17 or newer and pkg-config (Debian: libfabric-dev, pkg-config): \
             {error}"
        )
    });
    cc::Build::new()
        .file("src/shim.c")
        .includes(library.include_paths)
        .warnings_into_errors(true)
        .compile("farfield_fabric_shim");
}
