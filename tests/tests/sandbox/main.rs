//! Functions that are shipped to a server as WebAssembly: do they answer as natively compiled ones, and can they do any harm?

mod escapes;
mod guest;
mod places;
