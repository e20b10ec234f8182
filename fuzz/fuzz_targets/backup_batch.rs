//! Batches of a backup: pages of a memory server are read within their bounds, and a lock or a
//! channel that is read is the one that was written.
#![no_main]

use farfield_core::dsm::{
    BackupImage, BackupLayout, BackupReadStep, BackupReader, CommitWord, StoredChannel, StoredLock, StoredMessage,
};
use farfield_core::geometry::PAGE_BYTES;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(lock) = StoredLock::decode(bytes) {
        assert_eq!(lock.encode(), bytes);
    }
    if let Ok(channel) = StoredChannel::decode(bytes) {
        assert_eq!(channel.encode(), bytes);
    }
    if let Ok(message) = StoredMessage::decode(bytes) {
        assert_eq!(message.encode(), bytes);
    }
    let layout = BackupLayout::for_objects(1 << 16);
    let Some((commit, contents)) = bytes.split_first() else { return };
    let commit = CommitWord::from_bits(u64::from(*commit));
    let mut pages = vec![0; (layout.end_page(commit) * PAGE_BYTES as u64) as usize];
    let start = layout.first_page(commit) as usize * PAGE_BYTES;
    let len = contents.len().min(pages.len() - start);
    pages[start..start + len].copy_from_slice(&contents[..len]);
    let part = |first: u64, count: u64| &pages[first as usize * PAGE_BYTES..(first + count) as usize * PAGE_BYTES];
    let mut reader = BackupReader::new(layout, commit, BackupImage::default());
    while let BackupReadStep::Pages(first, count) = reader.poll_header() {
        if first >= layout.end_page(commit) {
            return;
        }
        let Ok(BackupReadStep::Pages(first, count)) = reader.on_header(part(first, count)) else { return };
        if reader.on_batch(part(first, count)).is_err() {
            return;
        }
    }
    reader.into_image();
});
