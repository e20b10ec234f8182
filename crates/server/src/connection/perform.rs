//! All requests except reads and calls, served one after the other.

use super::link::lost;
use super::{ClientConnection, CloseReason, Transport, is_late};
use crate::fabric::{self, FabricError};
use crate::random::random_nonzero_u128;
use crate::sessions::{ClientSession, SessionClosed};
use crate::store::{RegionStoreError, StoredRegion};
use farfield_core::wire::{self, ErrorCode, MessageKind, Request, WireRequest};
use farfield_core::{RegionId, checksum};
use farfield_os::serving;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

/// Most pages of one region.
const REGION_PAGES_MAX: u64 = 1 << 32;

impl ClientConnection<'_> {
    pub(super) fn serve_one(
        &mut self,
        session: &Arc<ClientSession>,
        wire: &WireRequest<'_>,
        arrived: Instant,
    ) -> Result<(), CloseReason> {
        self.conversation.on_answered();
        let tag = wire.tag;
        if wire.deadline.is_some() && is_late(wire, arrived, Instant::now()) {
            self.fail(tag, ErrorCode::TimedOut, 0);
            return Ok(());
        }
        let kind = wire.request.kind();
        self.tally.request(kind);
        let outcome = self.perform(session, tag, kind, &wire.request);
        if let Err((code, page)) = outcome {
            self.fail(tag, code, page);
        }
        match (wire.request, outcome) {
            (Request::Bye, _) => {
                self.flush()?;
                Err(CloseReason::Bye)
            }
            (Request::MapRegion { region, first_layer }, Ok(())) => self.send_map(session, tag, region, first_layer),
            _ => Ok(()),
        }
    }

    /// Performs a request and appends the answer to the outbox.
    fn perform(
        &mut self,
        session: &Arc<ClientSession>,
        tag: u64,
        kind: MessageKind,
        request: &Request<'_>,
    ) -> Result<(), (ErrorCode, u64)> {
        let find = |id| session.region(id).ok_or((ErrorCode::UnknownRegion, 0));
        let local = || match self.transport {
            Transport::Unix => Ok(()),
            Transport::Tcp | Transport::Tls => Err((ErrorCode::Unsupported, 0)),
        };
        match *request {
            Request::Write { region, page, pages } => {
                let region = find(region)?;
                for (index, (sum, bytes)) in pages.iter().enumerate() {
                    if checksum(bytes) != sum {
                        return Err((ErrorCode::Corrupt, page.0.saturating_add(index as u64)));
                    }
                }
                region.write(page, pages.bytes(), |index| pages.sum(index)).map_err(error_code)?;
                self.tally.written_pages += u64::from(pages.count());
            }
            Request::Discard { region, page, count } => {
                let forgotten = find(region)?.discard(page, u64::from(count)).map_err(error_code)?;
                self.tally.discarded_pages += forgotten;
            }
            Request::CreateRegion { pages } => {
                if pages == 0 || pages > REGION_PAGES_MAX {
                    return Err((ErrorCode::BadRequest, pages));
                }
                let region = StoredRegion::new(pages, session.account.clone()).map_err(error_code)?;
                let region = self.shared.sessions.add_region(session, region).map_err(ended)?;
                tracing::debug!(session = session.number, region = region.0, pages, "region created");
                self.answer(|out| wire::encode_created(tag, region, out));
                return Ok(());
            }
            Request::DropRegion { region } => {
                session.remove(region).ok_or((ErrorCode::UnknownRegion, 0))?;
                tracing::debug!(session = session.number, region = region.0, "region dropped");
            }
            Request::CloneRegion { region } => {
                let snapshot = find(region)?.snapshot().map_err(error_code)?;
                let secret = random_nonzero_u128().map_err(|errno| error_code(RegionStoreError::from(errno)))?;
                self.shared.sessions.add_ticket(secret, snapshot, session.tenant.clone(), Instant::now());
                self.answer(|out| wire::encode_ticket(tag, secret, out));
                return Ok(());
            }
            Request::ClaimRegion { ticket } => {
                let snapshot = self.shared.sessions.claim(ticket, &session.tenant, Instant::now());
                let snapshot = snapshot.ok_or((ErrorCode::Ticket, 0))?;
                let region = StoredRegion::from_snapshot(snapshot, session.account.clone()).map_err(error_code)?;
                let pages = region.pages();
                let region = self.shared.sessions.add_region(session, region).map_err(ended)?;
                tracing::debug!(session = session.number, region = region.0, pages, "region cloned");
                self.answer(|out| wire::encode_claimed(tag, region, pages, out));
                return Ok(());
            }
            Request::Stat => {
                self.add_up();
                let stat = self.shared.stat_for(&session.tenant);
                self.answer(|out| wire::encode_stat(tag, &stat, out));
                return Ok(());
            }
            Request::MapRegion { region, .. } => {
                local()?;
                find(region)?;
                // The answer carries descriptors, so it is sent by itself.
                return Ok(());
            }
            Request::Reserve { region, pages } => {
                local()?;
                find(region)?.reserve(u64::from(pages)).map_err(error_code)?;
            }
            Request::Release { region, pages } => {
                local()?;
                find(region)?.release(u64::from(pages)).map_err(error_code)?;
            }
            Request::Station => {
                let fabric = self.shared.fabric.as_ref().ok_or((ErrorCode::Unsupported, 0))?;
                let address = session.exposure.station(fabric, &session.account.ledger).map_err(fabric_code)?;
                let station = wire::StationReply { provider: fabric.provider(), address: &address };
                self.answer(|out| wire::encode_station(tag, &station, out));
                return Ok(());
            }
            Request::Expose { region: id, first_layer } => {
                let fabric = self.shared.fabric.as_ref().ok_or((ErrorCode::Unsupported, 0))?;
                let region = find(id)?;
                let layout =
                    session.exposure.layout(fabric, &session.account.ledger, id, &region).map_err(fabric_code)?;
                self.answer(|out| layout.encode(tag, first_layer, out));
                return Ok(());
            }
            Request::Bye => {
                tracing::debug!(session = session.number, "session ended by its client");
                self.shared.sessions.end(session);
            }
            Request::Ping => {}
            Request::Read { .. } | Request::ReadPart { .. } | Request::Call { .. } => {
                unreachable!("reads and calls are served in rows")
            }
        }
        self.answer(|out| wire::encode_ok(tag, kind, out));
        Ok(())
    }

    fn send_map(
        &mut self,
        session: &ClientSession,
        tag: u64,
        id: RegionId,
        first_layer: u32,
    ) -> Result<(), CloseReason> {
        let layers_max = wire::MapReply::LAYERS_AT_ONCE as usize;
        let found = session
            .region(id)
            .ok_or((ErrorCode::UnknownRegion, 0))
            .and_then(|region| region.descriptors(first_layer as usize, layers_max).map_err(error_code));
        let descriptors = match found {
            Ok(descriptors) => descriptors,
            Err((code, page)) => {
                self.fail(tag, code, page);
                return Ok(());
            }
        };
        let map = wire::MapReply {
            pages: descriptors.pages,
            generation: descriptors.generation,
            layers_total: descriptors.layers_total,
            first_layer: descriptors.first_layer,
            layers: descriptors.layers,
        };
        // Earlier answers are sent first, and the client must have received earlier descriptors. So
        // at most the descriptors of one answer are under way on each connection.
        self.flush()?;
        self.wait_until_taken()?;
        let start = self.outbox.len();
        self.answer(|out| wire::encode_map(tag, &map, out));
        let until = Instant::now() + self.shared.config.stall_max;
        loop {
            let answer = self.outbox.get(start..).unwrap_or_default();
            match serving::send_descriptors(self.fd.as_fd(), answer, &descriptors.fds) {
                Ok(count) => {
                    self.tally.sent_bytes += count as u64;
                    self.sent += count;
                    self.under_way = Some(descriptors.held);
                    return self.flush();
                }
                Err(errno) if errno.is_transient() => {
                    self.turn.end();
                    self.wait(libc::POLLOUT, until).and_then(|ready| match ready {
                        true => Ok(()),
                        false => Err(CloseReason::Stalled),
                    })?
                }
                Err(errno) => return Err(lost(errno)),
            }
        }
    }
}

fn fabric_code(error: FabricError) -> (ErrorCode, u64) {
    if let Some(error) = fabric::store_error(&error) {
        return error_code(error);
    }
    tracing::error!(%error, "cannot open memory for one-sided reads");
    (ErrorCode::Internal, 0)
}

fn ended(_: SessionClosed) -> (ErrorCode, u64) {
    (ErrorCode::BadRequest, 0)
}

pub(super) fn error_code(error: RegionStoreError) -> (ErrorCode, u64) {
    match error {
        RegionStoreError::Full(_) => (ErrorCode::PoolFull, 0),
        RegionStoreError::TooMany(resource) => {
            tracing::debug!(resource = resource.name(), "refused: the client holds as much as is left for others");
            (ErrorCode::TooMuch, 0)
        }
        RegionStoreError::OutOfRange => (ErrorCode::OutOfRange, 0),
        RegionStoreError::Corrupt(page) => (ErrorCode::Corrupt, page.0),
        RegionStoreError::Os(errno) => {
            tracing::error!(%errno, "the operating system refused");
            (ErrorCode::Internal, 0)
        }
    }
}
