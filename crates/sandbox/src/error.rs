//! Why a call of shipped code has no answer.

use farfield_wic::CallError;

/// Why a call of shipped code has no answer.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SandboxError {
    /// The file is no code that could be shipped.
    #[error("this is no code for a sandbox: {reason}")]
    Code {
        /// What is wrong with it.
        reason: String,
    },
    /// The memory server takes no code.
    #[error("the memory server takes no code from others: start it with `farfield serve --sandbox`")]
    NoSandbox,
    /// The memory server did not take the code.
    #[error("the memory server did not take the code: {reason}")]
    Refused {
        /// What it says.
        reason: String,
    },
    /// The code has no function of this name.
    #[error("the code has no function {name:?}: name it in its `farfield_sandbox::export!`")]
    NoFunction {
        /// The name.
        name: &'static str,
    },
    /// The code has the function in another version.
    #[error("the code has version {theirs} of the function {name:?}, this program {ours}: build the code again")]
    OtherVersion {
        /// The name.
        name: &'static str,
        /// The version of this program.
        ours: u32,
        /// The newest of the code.
        theirs: u32,
    },
    /// The code did what it must not, or failed: an access outside of its own memory, a panic, too much memory or too deep a recursion, an answer that is none.
    #[error("the code was ended in its sandbox: {reason}")]
    Broken {
        /// What it did.
        reason: String,
    },
    /// The call failed as one of a native function would.
    #[error(transparent)]
    Call(#[from] CallError),
}
