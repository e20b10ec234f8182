//! Errors of calls of shipped code.

use farfield_wic::CallError;

/// Reason why a call of shipped code has no answer.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SandboxError {
    /// The file is not code that can be shipped.
    #[error("the code is not valid for a sandbox: {reason}")]
    Code {
        /// Problem of the file.
        reason: String,
    },
    /// The memory server does not accept code.
    #[error("the memory server runs no shipped code: start it with `farfield serve --sandbox`")]
    NoSandbox,
    /// The memory server did not take the code.
    #[error("the memory server refused the code: {reason}")]
    Refused {
        /// Reason that the server gave.
        reason: String,
    },
    /// The code has no function of this name.
    #[error("the code has no function {name:?}: name it in its `farfield_sandbox::export!`")]
    NoFunction {
        /// Name of the function.
        name: &'static str,
    },
    /// The code has the function in another version.
    #[error("the code has version {theirs} of the function {name:?}, this program {ours}: build the code again")]
    OtherVersion {
        /// Name of the function.
        name: &'static str,
        /// Version of this program.
        ours: u32,
        /// Newest version in the code.
        theirs: u32,
    },
    /// The code did something forbidden, or failed. Examples are an access outside of its own
    /// memory, a panic, too much memory, too deep a recursion, and an invalid answer.
    #[error("the sandbox stopped the code: {reason}")]
    Broken {
        /// Fault of the code.
        reason: String,
    },
    /// The call failed in the way in which a native function can fail.
    #[error(transparent)]
    Call(#[from] CallError),
}
