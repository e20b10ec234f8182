//! Authentication of clients, and admission to a session.

use super::{BATCH_PAGES_MAX, ClientConnection, CloseReason, IN_FLIGHT_MAX, Transport};
use crate::address::PeerAddress;
use crate::random::random_nonzero_u128;
use crate::server::ServerState;
use crate::sessions::ClientSession;
use crate::store::{Charge, Ledger, Resource};
use farfield_core::wire::{self, ConnectionRefusal, Hello, RefuseCode};
use farfield_tls::RecordStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

impl ClientConnection<'_> {
    pub(super) fn greeted(
        &mut self,
        greeting: Result<Greeting, (RefuseCode, &'static str)>,
    ) -> Result<(), CloseReason> {
        match greeting {
            Ok(Greeting { session, welcome, ledger, held }) => {
                self.shared.connections.mark_authenticated(self.number);
                self.session = Some(session);
                self.turn = ledger.turn();
                self.ledger = Some(ledger);
                self.held = Some(held);
                if self.records.is_some() {
                    self.records_held = self.buffer(RecordStream::SERVER_BYTES, 0)?;
                }
                if let Some(records) = &mut self.records {
                    records.grow();
                }
                self.conversation.on_welcome(&welcome);
                self.answer(|out| welcome.encode(out));
                Ok(())
            }
            Err((code, text)) => Err(self.refuse(code, text)),
        }
    }

    pub(super) fn refuse(&mut self, code: RefuseCode, text: &str) -> CloseReason {
        let refusal = ConnectionRefusal { code, version_min: wire::VERSION_MIN, version_max: wire::VERSION_MAX, text };
        wire::encode_refusal(&refusal, &mut self.outbox);
        CloseReason::Refused(code)
    }
}

/// Result of a successful greeting.
pub(super) struct Greeting {
    session: Arc<ClientSession>,
    welcome: wire::Welcome,
    /// Ledger that pays for the connection.
    ledger: Arc<Ledger>,
    held: Charge,
}

/// Admits the client to a session, or returns the reason why not.
pub(super) fn greet(
    shared: &ServerState,
    transport: Transport,
    address: PeerAddress,
    names: &[String],
    hello: &Hello<'_>,
    version: Option<u16>,
) -> Result<Greeting, (RefuseCode, &'static str)> {
    let Some(version) = version else {
        return Err((RefuseCode::Version, "no protocol version in common: use the same release on both sides"));
    };
    let joined = hello.session.and_then(|secret| shared.sessions.tenant_of(secret));
    if joined.is_none() && shared.penalties.is_closed(address, Instant::now()) {
        return Err((RefuseCode::Guesses, "too many wrong tokens came from your address: wait a few seconds"));
    }
    let joined = joined.filter(|tenant| shared.tenants.may_join(tenant, hello.token, names));
    let Some(tenant) = joined.or_else(|| shared.tenants.find(hello.token, names)) else {
        if hello.token.is_empty() && !names.is_empty() {
            let text = "no tenant has a name that is in your certificate: add it to the token file, or give a token";
            return Err((RefuseCode::Tenant, text));
        }
        shared.penalties.add(address, Instant::now());
        return Err((RefuseCode::Token, "wrong token"));
    };
    let account = tenant.account(&shared.capacity, || shared.address_ledgers.of(address));
    let ledger = account.ledger.clone();
    let too_many = "you have as many connections as are left for others: close some, or raise --max-connections";
    let held = ledger.charge(Resource::Connections, 1).map_err(|_| (RefuseCode::Connections, too_many))?;
    let session = match hello.session {
        Some(secret) => shared
            .sessions
            .join(secret, &tenant)
            .ok_or((RefuseCode::Session, "the session is over: its lease ran out or the server is another one"))?,
        // A client that comes to claim a snapshot continues work that is here already.
        None if shared.draining.load(Ordering::Relaxed) && !shared.sessions.awaits_claim(&tenant) => {
            return Err((RefuseCode::Stopping, "the server is about to stop"));
        }
        None => {
            let secret =
                random_nonzero_u128().map_err(|_| (RefuseCode::Malformed, "the server has no random numbers"))?;
            let opened = shared.sessions.open(wire::SessionSecret(secret), tenant.clone(), account, hello.client_name);
            let too_many = "you have too many sessions: end some, or wait for their leases";
            let session = opened.map_err(|_| (RefuseCode::Connections, too_many))?;
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
    if shared.fabric.is_some() && transport != Transport::Tls {
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
    Ok(Greeting { session, welcome, ledger, held })
}
