//! Who the client is, and whether it may go on.

use super::{BATCH_PAGES_MAX, Connection, End, IN_FLIGHT_MAX, Transport};
use crate::server::Shared;
use crate::sessions::{Session, Tenant};
use farfield_core::wire::{self, Hello, Refusal, RefuseCode};
use farfield_os::{Errno, serving};
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Connection<'_> {
    pub(super) fn greeted(
        &mut self,
        greeting: Result<(Arc<Session>, wire::Welcome), (RefuseCode, &'static str)>,
    ) -> Result<(), End> {
        match greeting {
            Ok((session, welcome)) => {
                self.session = Some(session);
                self.conversation.on_welcome(&welcome);
                self.answer(|out| welcome.encode(out));
                Ok(())
            }
            Err((code, text)) => Err(self.refuse(code, text)),
        }
    }

    pub(super) fn refuse(&mut self, code: RefuseCode, text: &str) -> End {
        let refusal = Refusal { code, version_min: wire::VERSION_MIN, version_max: wire::VERSION_MAX, text };
        wire::encode_refusal(&refusal, &mut self.outbox);
        End::Refused(code)
    }
}

/// Takes the client into a session, or says why not.
pub(super) fn greet(
    shared: &Shared,
    transport: Transport,
    hello: &Hello<'_>,
    version: Option<u16>,
) -> Result<(Arc<Session>, wire::Welcome), (RefuseCode, &'static str)> {
    let Some(version) = version else {
        return Err((RefuseCode::Version, "no protocol version in common: use the same release on both sides"));
    };
    let tenant: &Arc<Tenant> = shared.tenant_of(hello.token).ok_or((RefuseCode::Token, "wrong token"))?;
    let session = match hello.session {
        Some(secret) => shared
            .sessions
            .join(secret, tenant)
            .ok_or((RefuseCode::Session, "the session is over: its lease ran out or the server is another one"))?,
        // Who comes for a snapshot goes on with work that is here already.
        None if shared.draining.load(Ordering::Relaxed) && !shared.sessions.awaits_claim(tenant) => {
            return Err((RefuseCode::Stopping, "the server is about to stop"));
        }
        None => {
            let secret = random_u128().map_err(|_| (RefuseCode::Malformed, "the server has no random numbers"))?;
            let session = shared.sessions.open(wire::SessionSecret(secret), tenant.clone(), hello.client_name);
            let (number, client, tenant) = (session.number, &session.client_name, &session.tenant.name);
            tracing::debug!(session = number, client, tenant, ?transport, "session opened");
            session
        }
    };
    let mut features = wire::features::CLONE | wire::features::PART;
    if shared.config.functions.functions().next().is_some() {
        features |= wire::features::CALL;
    }
    if transport == Transport::Unix {
        features |= wire::features::MAP;
    }
    if shared.fabric.is_some() {
        features |= wire::features::FABRIC;
    }
    let welcome = wire::Welcome {
        version,
        lease_ms: u32::try_from(shared.config.lease.as_millis()).unwrap_or(u32::MAX),
        features: hello.features & features,
        incarnation: shared.incarnation,
        session: session.secret,
        batch_pages_max: BATCH_PAGES_MAX,
        in_flight_max: IN_FLIGHT_MAX,
    };
    Ok((session, welcome))
}

pub(crate) fn random_u128() -> Result<u128, Errno> {
    let mut bytes = [0; 16];
    loop {
        serving::fill_random(&mut bytes)?;
        // Zero means "none" on the wire.
        match u128::from_le_bytes(bytes) {
            0 => {}
            number => return Ok(number),
        }
    }
}
