//! Accounts whose history is in far memory, and a function that computes a balance beside it.
//!
//! The program (`main.rs`) links this crate. The memory server loads it:
//! `farfield serve --functions target/release/libledger.so`.

use farfield::{AtServer, FarBox, FarFunction, FarPlace, FarRef, FarView, Fault};

farfield_plugin::export!(AtServer<Balance>);

/// An entry of an account, which owns the ones before it.
#[derive(FarView)]
pub struct Entry {
    /// Day of the entry.
    pub day: u32,
    /// Amount; negative if it was spent.
    pub cents: i64,
    /// The entry before this one.
    pub before: Option<FarBox<Entry>>,
}

/// Returns the balance of an account at the end of a day, in cents.
pub struct Balance;

impl FarFunction for Balance {
    const NAME: &'static str = "ledger.balance";
    const VERSION: u32 = 1;
    type Root = Entry;
    type Argument = u32;
    type Answer = i64;

    async fn run<P: FarPlace>(far: &P, newest: FarRef<'_, Entry>, day: u32) -> Result<i64, Fault> {
        let (mut next, mut sum) = (Some(newest), 0);
        while let Some(pointer) = next {
            let entry = far.follow(pointer).await?;
            if entry.day <= day {
                sum += entry.cents;
            }
            next = entry.before;
        }
        Ok(sum)
    }
}
