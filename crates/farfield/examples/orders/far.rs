//! The orders of a shop, and a report on them, in a tenth of the memory. `plain.rs` with far collections; the guide says how, step by step.
//!
//! `cargo run --release -p farfield --example orders_far`

use farfield::{FarError, FarMap, FarString, FarVec, Heap, Scope};
use std::error::Error;
use std::io::{self, Write};

struct Order {
    customer: FarString,
    month: usize,
    cents: u64,
    /// What makes it large.
    note: [u8; 80],
}

#[derive(Default)]
struct Customer {
    cents: u64,
    /// Which orders are theirs.
    orders: FarVec<usize>,
}

struct Shop {
    orders: FarVec<Order>,
    customers: FarMap<str, Customer>,
}

impl Shop {
    fn new(heap: &Heap) -> Result<Shop, Box<dyn Error>> {
        Ok(Shop { orders: FarVec::new(), customers: FarMap::new(heap)? })
    }

    fn take(&mut self, scope: &Scope<'_>, order: Order) -> Result<(), FarError> {
        let name = order.customer.get(scope)?;
        let customer = self.customers.entry(scope, name)?.or_insert_with(Customer::default);
        let customer = customer.map_err(|full| full.error)?;
        customer.cents += order.cents;
        customer.orders.push(scope, self.orders.len())?;
        Ok(self.orders.push(scope, order)?)
    }

    fn months(&self, heap: &Heap) -> Result<[u64; 12], FarError> {
        let mut sums = [0; 12];
        let mut scope = heap.enter();
        // Each order once, and not again soon.
        let mut orders = self.orders.scan(&mut scope).once();
        while let Some(orders) = orders.next_chunk()? {
            for order in orders {
                sums[order.month] += order.cents;
            }
        }
        Ok(sums)
    }

    fn best(&self, heap: &Heap) -> Result<Vec<(u64, String)>, FarError> {
        let mut best = Vec::new();
        self.customers.for_each(&mut heap.enter(), |name, customer| best.push((customer.cents, name.to_owned())))?;
        best.sort();
        Ok(best.split_off(best.len().saturating_sub(3)))
    }

    /// The last orders of a customer.
    fn last(&self, scope: &Scope<'_>, name: &str, count: usize) -> Result<Vec<(u64, u8)>, FarError> {
        let Some(customer) = self.customers.get(scope, name)? else { return Ok(Vec::new()) };
        let mut indices = Vec::new();
        for at in (0..customer.orders.len()).rev().take(count) {
            indices.push(*customer.orders.at(scope, at)?);
        }
        // They lie anywhere: all are asked for before the first one is waited for.
        for index in &indices {
            self.orders.will_need(scope, *index..=*index);
        }
        let last =
            indices.into_iter().map(|index| self.orders.at(scope, index).map(|order| (order.cents, order.note[0])));
        last.collect()
    }
}

fn order(scope: &Scope<'_>, number: u64) -> Result<Order, FarError> {
    let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
    let customer = FarString::copy_of(scope, &format!("customer {}", mixed % 500))?;
    Ok(Order { customer, month: (number % 12) as usize, cents: mixed % 10_000, note: [mixed as u8; 80] })
}

pub(crate) fn report(heap: &Heap, orders: u64, out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let mut shop = Shop::new(heap)?;
    for number in 0..orders {
        let scope = heap.enter();
        shop.take(&scope, order(&scope, number)?)?;
    }
    writeln!(out, "months: {:?}", shop.months(heap)?)?;
    for (cents, name) in shop.best(heap)? {
        writeln!(out, "{name} has paid {cents} cents; at last {:?}", shop.last(&heap.enter(), &name, 4)?)?;
    }
    Ok(writeln!(out, "nobody: {:?}", shop.last(&heap.enter(), "nobody", 4)?)?)
}

#[allow(dead_code, reason = "the test of the guide calls report")]
fn main() -> Result<(), Box<dyn Error>> {
    let mut builder = Heap::builder().near(16 << 20);
    for url in std::env::args().skip(1) {
        builder = builder.pool(url);
    }
    let heap = builder.build()?;
    report(&heap, 1_000_000, &mut io::stdout())?;
    eprintln!("{:#?}", heap.stats());
    Ok(())
}
