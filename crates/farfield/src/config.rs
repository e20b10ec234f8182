//! Settings from which a heap is built.

use crate::Heap;
use crate::error::BuildError;
use crate::plane::Plane;
use core::time::Duration;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::{FRAMES_MAX, Hotness};
use farfield_pool::PoolBuilder;

/// Method by which a heap verifies the bytes that come back from its pool. Bytes that differ from
/// what was written there are [`PoolError::Corrupt`](crate::PoolError::Corrupt). Chosen with
/// [`Builder::verify`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Verify {
    /// By half of the checksum (XXH3) that travels with each page and with each part of a page.
    /// This finds what a server has lost or mixed up: a write that was not stored, an old version,
    /// another page, zeros. One such answer in four billion passes. The check costs nothing but its
    /// four bytes. A server that computes pages to deceive can defeat it, because everybody can
    /// compute the checksum.
    #[default]
    Checksum,
    /// By a hash of 32 bits under a key that only this process has. Of the answers that a hostile
    /// server makes up, one in two billion passes, whatever the server knows or computes. Values do
    /// not come alone, because their part of a page does not tell who wrote it. Misses of the
    /// object and hybrid plane therefore bring whole pages, and keep one value of each. The hash
    /// costs one more pass over each page that comes or leaves, a fraction of a microsecond.
    ///
    /// The hash hides nothing: the server can read the pages that it keeps, and can refuse to
    /// answer. Answers of functions that run at the server, and the numbers that such functions
    /// wrote, are not verified.
    Keyed,
}

/// Settings of a new heap: the size of near and far memory, and the location of far memory. Made by
/// [`Heap::builder`].
#[derive(Clone, Debug)]
pub struct Builder {
    near: u64,
    near_max: Option<u64>,
    far: Option<u64>,
    plane: Plane,
    car_threshold: Option<f64>,
    alone_above: usize,
    hotness: Hotness,
    verify: Verify,
    pool_builder: PoolBuilder,
    has_pool: bool,
    name: Option<String>,
    patience: Duration,
    paranoid: bool,
}

/// Checked settings from which a heap is built.
pub(crate) struct Config {
    pub(crate) near: u64,
    /// Number of frames that the arena can ever have, including frame 0.
    pub(crate) frames: u32,
    /// Number of far pages, a multiple of [`Config::FAR_STEP_PAGES`].
    pub(crate) far_pages: u64,
    pub(crate) plane: Plane,
    pub(crate) car_threshold: Option<f64>,
    pub(crate) alone_above: usize,
    pub(crate) hotness: Hotness,
    pub(crate) verify: Verify,
    /// Number of small values that there can be; a multiple of [`Config::FAR_STEP_PAGES`]. 0 unless
    /// the plane has handles.
    pub(crate) handles: u32,
    pub(crate) pool_builder: PoolBuilder,
    pub(crate) name: Option<String>,
    pub(crate) patience: Duration,
    pub(crate) paranoid: bool,
}

impl Config {
    /// Number of pages by which the far address space of a heap is rounded up: 256 MiB.
    pub(crate) const FAR_STEP_PAGES: u64 = 1 << 16;
}

/// Least near memory in bytes. Lower under Miri, which takes milliseconds for a page.
pub(crate) const NEAR_MIN: u64 = if cfg!(miri) { 1 << 18 } else { 1 << 20 };
const ARENA_MAX: u64 = FRAMES_MAX as u64 * PAGE_BYTES as u64;
const FAR_MAX: u64 = 8 << 40;
const HANDLES_PER_PAGE: u64 = 64;
const HANDLES_MAX: u64 = 1 << 30;
const NAME_BYTES_MAX: usize = 64;
/// Default of [`Builder::alone_above`] in bytes. Smaller values would grow by more than a third
/// with handle and tag.
const ALONE_ABOVE: usize = 32;

impl Builder {
    pub(crate) fn new() -> Builder {
        Builder {
            near: 64 << 20,
            near_max: None,
            far: None,
            plane: Plane::Page,
            car_threshold: None,
            alone_above: ALONE_ABOVE,
            hotness: Hotness::Mark,
            verify: Verify::Checksum,
            pool_builder: PoolBuilder::new().client_name("farfield heap").repair_thread(),
            has_pool: false,
            name: None,
            patience: Duration::from_secs(10),
            paranoid: false,
        }
    }

    /// Sets the near memory in bytes, tables included; at least 1 MiB. Default: 64 MiB.
    pub fn near(mut self, bytes: u64) -> Builder {
        self.near = bytes;
        self
    }

    /// Sets the limit in bytes up to which [`Heap::set_near`] may raise the near memory. It costs
    /// address space only: five times as much, but at most 64 GiB, so that large values find room.
    /// Default: eight times near, at most 64 GiB.
    pub fn near_max(mut self, bytes: u64) -> Builder {
        self.near_max = Some(bytes);
        self
    }

    /// Sets the far address space in bytes, rounded up to 256 MiB; at most 8 TiB. Unused addresses
    /// cost nothing. Default: 64 times near.
    pub fn far(mut self, bytes: u64) -> Builder {
        self.far = Some(bytes);
        self
    }

    /// Chooses how misses of small values are served. Default: [`Plane::Page`].
    pub fn plane(mut self, plane: Plane) -> Builder {
        self.plane = plane;
        self
    }

    /// Hybrid plane: sets the *card access rate* from which a page comes whole next time. The rate
    /// is the share of the page's small values that were used while it was near, between 0 and 1.
    /// Atlas takes 0.8 (section 5.4). By default, the heap decides by what saves more misses: from
    /// how well pages did that came whole, and from how much near memory is missing.
    pub fn car_threshold(mut self, share: f64) -> Builder {
        self.car_threshold = Some(share);
        self
    }

    /// Hybrid plane: values of more than this number of bytes can come alone. Smaller ones come
    /// with their page, as on [`Plane::Page`]. To come alone costs each value twelve bytes, eight
    /// of which are always near: much for a small one. 0: all can come alone. Default: 32.
    pub fn alone_above(mut self, bytes: usize) -> Builder {
        self.alone_above = bytes;
        self
    }

    /// Object and hybrid plane: chooses which small values stay near while others of their page
    /// leave. Experimental, for comparison with the default, which is one mark for each value.
    pub fn hotness(mut self, hotness: Hotness) -> Builder {
        self.hotness = hotness;
        self
    }

    /// Chooses how the heap verifies what comes back from the pool. Default: by checksums, which
    /// find what a server has lost or mixed up.
    pub fn verify(mut self, verify: Verify) -> Builder {
        self.verify = verify;
        self
    }

    /// Adds a place for far memory: the URL of a memory server, such as `tcp://10.0.0.7:7400` or
    /// `shm:/run/farfield.sock`, or of a file of this process, `ssd:/var/tmp?size=64G`. Several
    /// calls add several places, which share the load.
    /// `mirror(tcp://10.0.0.7:7400,tcp://10.0.0.8:7400)` keeps everything at both servers, and one
    /// of them may die. `ec(4,2,…)` (erasure code) has six servers, and any two of them may die.
    /// Default: `ram:`, the memory of this process, to try things out.
    pub fn pool(mut self, url: impl Into<String>) -> Builder {
        self.pool_builder = self.pool_builder.url(url);
        self.has_pool = true;
        self
    }

    /// Sets the token that proves to the servers that we may use them.
    pub fn token(mut self, token: impl Into<String>) -> Builder {
        self.pool_builder = self.pool_builder.token(token);
        self
    }

    /// Shows the heap, under this name, to the same user's `farfield top`, as long as it exists.
    /// Several heaps may have the same name. A name has 1 to 64 bytes and no control characters.
    /// Default: not shown. Costs a file descriptor, and a thread that publishes [`Heap::stats`]
    /// four times a second.
    pub fn name(mut self, name: impl Into<String>) -> Builder {
        self.name = Some(name.into());
        self
    }

    /// Sets how long an operation waits for near memory or for the pool before it fails. Default:
    /// 10 s.
    pub fn patience(mut self, patience: Duration) -> Builder {
        self.patience = patience;
        self
    }

    /// Overwrites near memory that holds nothing, and protects an eighth of it, so that a use of a value
    /// that has left stops the program there; who writes to the rest is noticed when it is used again.
    /// For tests: slow, and only for near memories up to 64 MiB.
    pub fn paranoid(mut self, paranoid: bool) -> Builder {
        self.paranoid = paranoid;
        self
    }

    /// Opens the pool and makes the heap.
    ///
    /// # Errors
    /// Returns [`BuildError::Argument`] if a setting is out of its bounds; otherwise what the pool
    /// or the operating system refused.
    pub fn build(self) -> Result<Heap, BuildError> {
        if self.near < NEAR_MIN {
            return Err(BuildError::Argument("near memory must be at least 1 MiB"));
        }
        let near_max = self.near_max.unwrap_or(self.near.saturating_mul(8).min(ARENA_MAX));
        if near_max < self.near || near_max > ARENA_MAX {
            return Err(BuildError::Argument("near_max must be at least near and below 64 GiB"));
        }
        if self.paranoid && near_max > 512 << 20 {
            return Err(BuildError::Argument("a paranoid heap can have at most 64 MiB near (near_max 512 MiB)"));
        }
        let far = self.far.unwrap_or(self.near.saturating_mul(64).min(FAR_MAX));
        if far == 0 || far > FAR_MAX {
            return Err(BuildError::Argument("far must be between one byte and 8 TiB"));
        }
        if self.car_threshold.is_some_and(|share| !(0.0..=1.0).contains(&share)) {
            return Err(BuildError::Argument("car_threshold must be between 0 and 1"));
        }
        let is_name = |name: &String| (1..=NAME_BYTES_MAX).contains(&name.len()) && !name.contains(char::is_control);
        if !self.name.as_ref().is_none_or(is_name) {
            return Err(BuildError::Argument("a name has one to 64 bytes, and no control characters"));
        }
        let far_pages = far.div_ceil(PAGE_BYTES as u64).next_multiple_of(Config::FAR_STEP_PAGES);
        let handles = match self.plane {
            Plane::Page => 0,
            // As many handles as there is room for values of 64 bytes.
            Plane::Object | Plane::Hybrid => (far_pages * HANDLES_PER_PAGE).min(HANDLES_MAX) as u32,
        };
        let pool_builder = if self.has_pool { self.pool_builder } else { self.pool_builder.url("ram:") };
        Heap::from_config(Config {
            near: self.near,
            frames: (near_max / PAGE_BYTES as u64) as u32,
            far_pages,
            plane: self.plane,
            car_threshold: self.car_threshold,
            alone_above: self.alone_above,
            hotness: self.hotness,
            verify: self.verify,
            handles,
            pool_builder: pool_builder.pages(far_pages).deadline(self.patience),
            name: self.name,
            patience: self.patience,
            paranoid: self.paranoid,
        })
    }
}
