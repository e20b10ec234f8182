//! What can be bought, as nodes and pool see it.

use super::file::{DimmOffer, ServerOffer};

/// Memory that is bought for a cluster.
#[derive(Clone, Debug, PartialEq)]
pub struct Purchase {
    /// Name, for reports.
    pub name: String,
    /// Price of all of it.
    pub price: f64,
    /// Near memory that each node gains.
    pub near_bytes: u64,
    /// Far memory that the pool gains.
    pub far_bytes: u64,
    /// Nodes that serve memory instead of running jobs.
    pub nodes_taken: u32,
}

const GIB: u64 = 1 << 30;

impl Purchase {
    /// Returns the purchase of nothing.
    pub fn nothing() -> Purchase {
        Purchase { name: "nothing".into(), price: 0.0, near_bytes: 0, far_bytes: 0, nodes_taken: 0 }
    }

    /// Returns this purchase and another one together.
    fn and(&self, other: &Purchase) -> Purchase {
        Purchase {
            name: format!("{} + {}", self.name, other.name),
            price: self.price + other.price,
            near_bytes: self.near_bytes + other.near_bytes,
            far_bytes: self.far_bytes + other.far_bytes,
            nodes_taken: self.nodes_taken + other.nodes_taken,
        }
    }
}

/// Returns all purchases for so many nodes, the purchase of nothing first.
pub(super) fn purchases(dimms: &[DimmOffer], servers: &[ServerOffer], both: bool, nodes: u32) -> Vec<Purchase> {
    let of_servers: Vec<Purchase> = servers.iter().flat_map(ServerOffer::purchases).collect();
    let of_dimms = |nodes: u32| dimms.iter().flat_map(move |row| row.purchases(nodes));
    let mut all = vec![Purchase::nothing()];
    all.extend(of_dimms(nodes));
    all.extend(of_servers.iter().cloned());
    if both {
        for server in &of_servers {
            // A node that serves memory needs no DIMMs for jobs.
            let nodes = nodes.saturating_sub(server.nodes_taken);
            all.extend(of_dimms(nodes).map(|dimms| dimms.and(server)));
        }
    }
    all
}

impl DimmOffer {
    /// Returns a purchase for each number of DIMMs that gives a node more memory than it has.
    fn purchases(&self, nodes: u32) -> Vec<Purchase> {
        let (gib, free, used) = (self.gib.get(), self.free_slots.get(), self.used_slots.get());
        let out_gib = self.used_gib.map_or(0, |size| size.get());
        let counts = (1..=free + used).filter(|count| count.is_multiple_of(self.step.get()));
        let purchase = |count: u64| {
            let out = count.saturating_sub(free);
            let added_gib = (count * gib).checked_sub(out * out_gib).filter(|added| *added > 0)?;
            let mut name = format!("{count} x {gib} GiB in each node");
            if out > 0 {
                name += &format!(" for {out} x {out_gib} GiB");
            }
            let price = self.price.get() * count as f64 * f64::from(nodes);
            Some(Purchase { name, price, near_bytes: added_gib * GIB, ..Purchase::nothing() })
        };
        counts.filter_map(purchase).collect()
    }
}

impl ServerOffer {
    /// Returns a purchase for each size.
    fn purchases(&self) -> Vec<Purchase> {
        let purchase = |gib: u64| {
            let nodes_taken = u32::try_from(self.takes_nodes.get()).unwrap_or(u32::MAX);
            let place = match nodes_taken {
                0 => String::new(),
                1 => " in place of a node".into(),
                nodes => format!(" in place of {nodes} nodes"),
            };
            Purchase {
                name: format!("a memory server of {gib} GiB{place}"),
                price: self.base_price.get() + self.price_per_gib.get() * gib as f64,
                near_bytes: 0,
                far_bytes: gib * GIB,
                nodes_taken,
            }
        };
        self.gib.iter().map(|size| purchase(size.get())).collect()
    }
}
