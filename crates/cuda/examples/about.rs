//! Prints, as JSON, the device, driver and compiler of this host and the hash of each kernel family: the
//! head of a record.

use tilewise_core::Backend as _;
use tilewise_cuda::{CudaBackend, records};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let info = CudaBackend::new(0)?.info();
    let detail = |wanted: &str| {
        info.details
            .iter()
            .find(|(name, _)| name == wanted)
            .map_or_else(String::new, |(_, value)| value.clone())
    };
    println!(
        "{}",
        serde_json::json!({
            "device": info.device,
            "driver": detail("driver"),
            "compiler": detail("compiler"),
            "families": records::hashes(),
        })
    );
    Ok(())
}
