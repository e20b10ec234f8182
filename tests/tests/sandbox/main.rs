//! Functions that come to a server after it was built, as WebAssembly or as a library: do they answer as those of the build, and can they do any harm?

mod escapes;
mod guest;
mod library;
mod places;
