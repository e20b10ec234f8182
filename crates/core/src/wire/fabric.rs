//! Answers about memory that is read over a fabric: its addresses, and the keys to it.

use super::bytes::{Fields, short_length};
use super::reply::append;
use super::{MessageHeader, MessageKind};
use alloc::vec::Vec;

/// A range of the server's memory, as a fabric names it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RemoteWindow {
    /// Remote key: a client that knows it may read.
    pub key: u64,
    /// Address of the first byte.
    pub base: u64,
}

impl RemoteWindow {
    const BYTES: usize = 16;

    fn encode(self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.key.to_le_bytes());
        out.extend_from_slice(&self.base.to_le_bytes());
    }

    fn decode(fields: &mut Fields<'_>) -> Option<RemoteWindow> {
        Some(RemoteWindow { key: fields.u64()?, base: fields.u64()? })
    }
}

/// Address at which the memory of a session can be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StationReply<'a> {
    /// Name of the fabric's provider.
    pub provider: &'a str,
    /// Address in the provider's own form.
    pub address: &'a [u8],
}

impl<'a> StationReply<'a> {
    /// Greatest length of a provider's name in bytes.
    pub const PROVIDER_BYTES_MAX: usize = 32;
    /// Greatest length of an address in bytes.
    pub const ADDRESS_BYTES_MAX: usize = 256;

    /// Decodes the body of an answer; `None` if it is malformed.
    pub fn decode(body: &'a [u8]) -> Option<StationReply<'a>> {
        let mut fields = Fields(body);
        let (provider, address) = (usize::from(fields.u16()?), usize::from(fields.u16()?));
        let texts = fields.0;
        if provider > Self::PROVIDER_BYTES_MAX || address > Self::ADDRESS_BYTES_MAX || texts.len() != provider + address
        {
            return None;
        }
        let (provider, address) = texts.split_at_checked(provider)?;
        Some(StationReply { provider: core::str::from_utf8(provider).ok()?, address })
    }
}

/// The windows through which a region is read: page map, checksums, then layers from `first_layer`
/// on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExposeReply<'a> {
    /// Number of pages of the region.
    pub pages: u64,
    /// Generation of the layers. It changes whenever layers that a client knows are replaced; the
    /// client must ask for all of them again.
    pub generation: u64,
    /// Number of layers of the region; the last is the one that is written.
    pub layers_total: u32,
    /// Index of the first layer that comes with this answer.
    pub first_layer: u32,
    /// Window of the page map.
    pub page_map: RemoteWindow,
    /// Window of the checksums.
    pub sums: RemoteWindow,
    layers: &'a [u8],
}

impl<'a> ExposeReply<'a> {
    /// Greatest number of layers in one answer, so that control answers stay small.
    pub const LAYERS_AT_ONCE: u32 = 56;

    /// Creates an answer without its layers, which follow from `first_layer` on. If the region has
    /// fewer layers, none follow. `windows` are page map and checksums.
    pub fn new(pages: u64, generation: u64, layers_total: u32, first_layer: u32, windows: [RemoteWindow; 2]) -> Self {
        let [page_map, sums] = windows;
        let first_layer = first_layer.min(layers_total);
        ExposeReply { pages, generation, layers_total, first_layer, page_map, sums, layers: &[] }
    }

    /// Decodes the body of an answer; `None` if it is malformed.
    pub fn decode(body: &'a [u8]) -> Option<ExposeReply<'a>> {
        let mut fields = Fields(body);
        let reply = ExposeReply {
            pages: fields.u64()?,
            generation: fields.u64()?,
            layers_total: fields.u32()?,
            first_layer: fields.u32()?,
            page_map: RemoteWindow::decode(&mut fields)?,
            sums: RemoteWindow::decode(&mut fields)?,
            layers: fields.0,
        };
        let layers = u32::try_from(reply.layers.len() / RemoteWindow::BYTES).ok()?;
        let is_right = reply.layers.len().is_multiple_of(RemoteWindow::BYTES)
            && (1..=super::MapReply::LAYERS_MAX).contains(&reply.layers_total)
            && layers <= Self::LAYERS_AT_ONCE
            && reply.first_layer.checked_add(layers)? <= reply.layers_total;
        is_right.then_some(reply)
    }

    /// Returns the windows of the layers that come with this answer.
    pub fn layers(&self) -> impl ExactSizeIterator<Item = RemoteWindow> + use<'a> {
        self.layers
            .chunks_exact(RemoteWindow::BYTES)
            .map(|bytes| RemoteWindow::decode(&mut Fields(bytes)).unwrap_or_default())
    }
}

/// Appends a [`StationReply`].
pub fn encode_station(tag: u64, station: &StationReply<'_>, out: &mut Vec<u8>) {
    let mut body = Vec::with_capacity(4 + station.provider.len() + station.address.len());
    body.extend_from_slice(&short_length(station.provider.len()).to_le_bytes());
    body.extend_from_slice(&short_length(station.address.len()).to_le_bytes());
    body.extend_from_slice(station.provider.as_bytes());
    body.extend_from_slice(station.address);
    append(MessageHeader { kind: MessageKind::Station.answer(), tag, ..MessageHeader::default() }, &body, out);
}

/// Appends an [`ExposeReply`] with these layers.
pub fn encode_expose(tag: u64, reply: &ExposeReply<'_>, layers: impl Iterator<Item = RemoteWindow>, out: &mut Vec<u8>) {
    let mut body = Vec::with_capacity(1024);
    body.extend_from_slice(&reply.pages.to_le_bytes());
    body.extend_from_slice(&reply.generation.to_le_bytes());
    body.extend_from_slice(&reply.layers_total.to_le_bytes());
    body.extend_from_slice(&reply.first_layer.to_le_bytes());
    reply.page_map.encode(&mut body);
    reply.sums.encode(&mut body);
    layers.for_each(|window| window.encode(&mut body));
    append(MessageHeader { kind: MessageKind::Expose.answer(), tag, ..MessageHeader::default() }, &body, out);
}
