//! Without a compiler, code is interpreted.

use super::{RunningGuest, SandboxEngine};
use core::time::Duration;
use std::sync::Arc;

/// Progress of one code: none.
pub(super) struct OneTier(());

pub(super) use OneTier as Tiers;

impl OneTier {
    pub(super) fn new(_: &[u8]) -> OneTier {
        OneTier(())
    }

    #[expect(clippy::unused_async, reason = "the compiler's is")]
    pub(super) async fn instantiate(self: &Arc<Self>, _: SandboxEngine) -> Option<RunningGuest> {
        None
    }

    pub(super) fn count_interpreted(&self, _: Duration) {}

    pub(super) fn drop_compiled(&self) {}
}

pub(super) fn is_full() -> bool {
    false
}
