//! The orders of a shop, and a report on them. A plain program; `far.rs` is what the guide makes of it.
//!
//! `cargo run --release -p farfield --example orders_plain`

use std::collections::HashMap;
use std::io::{self, Write};

struct Order {
    customer: String,
    month: usize,
    cents: u64,
    /// What makes it large.
    note: [u8; 80],
}

#[derive(Default)]
struct Customer {
    cents: u64,
    /// Which orders are theirs.
    orders: Vec<usize>,
}

struct Shop {
    orders: Vec<Order>,
    customers: HashMap<String, Customer>,
}

impl Shop {
    fn new() -> Shop {
        Shop { orders: Vec::new(), customers: HashMap::new() }
    }

    fn take(&mut self, order: Order) {
        let customer = self.customers.entry(order.customer.clone()).or_default();
        customer.cents += order.cents;
        customer.orders.push(self.orders.len());
        self.orders.push(order);
    }

    fn months(&self) -> [u64; 12] {
        let mut sums = [0; 12];
        for order in &self.orders {
            sums[order.month] += order.cents;
        }
        sums
    }

    fn best(&self) -> Vec<(u64, String)> {
        let mut best: Vec<_> = self.customers.iter().map(|(name, customer)| (customer.cents, name.clone())).collect();
        best.sort();
        best.split_off(best.len().saturating_sub(3))
    }

    /// The last orders of a customer.
    fn last(&self, name: &str, count: usize) -> Vec<(u64, u8)> {
        let Some(customer) = self.customers.get(name) else { return Vec::new() };
        let last = customer.orders.iter().rev().take(count);
        last.map(|index| (self.orders[*index].cents, self.orders[*index].note[0])).collect()
    }
}

fn order(number: u64) -> Order {
    let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
    let customer = format!("customer {}", mixed % 500);
    Order { customer, month: (number % 12) as usize, cents: mixed % 10_000, note: [mixed as u8; 80] }
}

pub(crate) fn report(orders: u64, out: &mut impl Write) -> io::Result<()> {
    let mut shop = Shop::new();
    for number in 0..orders {
        shop.take(order(number));
    }
    writeln!(out, "months: {:?}", shop.months())?;
    for (cents, name) in shop.best() {
        writeln!(out, "{name} has paid {cents} cents; at last {:?}", shop.last(&name, 4))?;
    }
    writeln!(out, "nobody: {:?}", shop.last("nobody", 4))
}

#[allow(dead_code, reason = "the test of the guide calls report")]
fn main() -> io::Result<()> {
    report(1_000_000, &mut io::stdout())
}
