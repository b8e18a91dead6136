//! Machine code: the disassembler, and what it prints counted.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Serialize;

/// Instructions of one kernel's machine code.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Counts {
    pub(super) instructions: u32,
    pub(super) global_loads: u32,
    /// Copies from global to shared memory that pass no register, those of the copy engine (TMA) among them.
    pub(super) global_to_shared: u32,
    /// Copies from shared to global memory by the copy engine.
    pub(super) shared_to_global: u32,
    pub(super) global_stores: u32,
    pub(super) shared_loads: u32,
    pub(super) shared_stores: u32,
    pub(super) local_loads: u32,
    pub(super) local_stores: u32,
    pub(super) atomics: u32,
    pub(super) matrix: u32,
    /// Those by name: `HMMA`, `HGMMA` of a warpgroup.
    pub(super) matrix_by: BTreeMap<String, u32>,
    /// Copies that pass no register by name: `LDGSTS`, `UTMALDG`, `UTMASTG`.
    pub(super) copies_by: BTreeMap<String, u32>,
    pub(super) exponentials: u32,
    pub(super) registers: Option<u32>,
}

impl Counts {
    fn take(&mut self, mnemonic: &str) {
        self.instructions += 1;
        let op = mnemonic.split('.').next().unwrap_or_default();
        let to_shared = matches!(op, "LDGSTS" | "UTMALDG")
            // Towards shared memory from global memory; the other way it is .G.S.
            || op == "UBLKCP" && mnemonic.contains(".S.G");
        let to_global =
            matches!(op, "UTMASTG" | "UTMAREDG" | "UBLKRED") || op == "UBLKCP" && !to_shared;
        if op.ends_with("MMA") {
            *self.matrix_by.entry(op.into()).or_default() += 1;
        }
        if to_shared || to_global {
            *self.copies_by.entry(op.into()).or_default() += 1;
        }
        let count = match op {
            "LDG" | "LD" => &mut self.global_loads,
            _ if to_shared => &mut self.global_to_shared,
            _ if to_global => &mut self.shared_to_global,
            "STG" | "ST" => &mut self.global_stores,
            "LDS" | "LDSM" => &mut self.shared_loads,
            "STS" | "STSM" => &mut self.shared_stores,
            "LDL" => &mut self.local_loads,
            "STL" => &mut self.local_stores,
            "ATOM" | "ATOMG" | "ATOMS" | "RED" | "REDG" => &mut self.atomics,
            _ if op.ends_with("MMA") => &mut self.matrix,
            "MUFU" if mnemonic.starts_with("MUFU.EX2") => &mut self.exponentials,
            _ => return,
        };
        *count += 1;
    }
}

/// Counts of each function in the text of `nvdisasm` or `cuobjdump -sass`.
pub(super) fn parse(text: &str) -> BTreeMap<String, Counts> {
    let mut all: BTreeMap<String, Counts> = BTreeMap::new();
    let mut current: Option<String> = None;
    let mut registers = None;
    for line in text.lines() {
        let line = line.trim();
        if let Some(name) = line.strip_prefix("Function : ") {
            current = Some(name.trim().to_string());
        } else if let Some(name) = line
            .strip_prefix(".text.")
            .and_then(|l| l.strip_suffix(':'))
        {
            current = Some(name.to_string());
        } else if let Some(rest) = line.split("SHI_REGISTERS=").nth(1) {
            let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
            registers = digits.parse().ok();
        }
        let Some(name) = &current else { continue };
        let counts = all.entry(name.clone()).or_default();
        counts.registers = registers.take().or(counts.registers);
        if let Some(mnemonic) = mnemonic(line) {
            counts.take(mnemonic);
        }
    }
    all
}

/// `HMMA.16816.F32` of `/*0a40*/  @!P0 HMMA.16816.F32 R4, … ;`.
fn mnemonic(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("/*")?;
    let (place, rest) = rest.split_once("*/")?;
    if place.is_empty() || !place.chars().all(|c| c.is_ascii_hexdigit()) {
        return None;
    }
    let mut words = rest.split_whitespace().filter(|word| *word != "{");
    let first = words.next()?;
    let word = if first.starts_with('@') {
        words.next()?
    } else {
        first
    };
    let word = word.trim_end_matches(';');
    let letter = word.starts_with(|c: char| c.is_ascii_uppercase());
    // The second line of an instruction is its encoding alone.
    letter.then_some(word)
}

/// The setting that names the disassembler.
const SETTING: &str = "TILEWISE_DISASSEMBLER";

/// `nvdisasm`, else `cuobjdump`: the one that is named, on PATH, in a toolkit, or beside NVRTC as PyPI lays
/// them.
pub(super) fn find(nvrtc: Option<&Path>) -> Option<PathBuf> {
    if let Some(named) = std::env::var_os(SETTING) {
        return Some(PathBuf::from(named));
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
    for name in ["CUDA_HOME", "CUDA_PATH"] {
        folders.extend(std::env::var_os(name).map(|root| PathBuf::from(root).join("bin")));
    }
    folders.push("/usr/local/cuda/bin".into());
    // …/nvidia/cu13/lib/libnvrtc.so.13 and …/nvidia/cu13/bin/nvdisasm
    let beside = nvrtc.and_then(|library| library.parent()?.parent());
    folders.extend(beside.map(|root| root.join("bin")));
    ["nvdisasm", "cuobjdump"].iter().find_map(|name| {
        let name = format!("{name}{}", std::env::consts::EXE_SUFFIX);
        let files = folders.iter().map(|folder| folder.join(&name));
        files.into_iter().find(|file| file.is_file())
    })
}

/// The disassembly of a cubin.
///
/// # Errors
/// What the disassembler says.
pub(super) fn disassemble(tool: &Path, cubin: &Path) -> Result<String, String> {
    let mut command = Command::new(tool);
    if tool.file_stem().is_some_and(|name| name == "cuobjdump") {
        command.arg("-sass");
    }
    let output = command
        .arg(cubin)
        .output()
        .map_err(|error| format!("{}: {error}", tool.display()))?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        let said = String::from_utf8_lossy(&output.stderr);
        let line = said.lines().next().unwrap_or("it failed and said nothing");
        Err(format!("{}: {line}", tool.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_disassemblers_are_read() {
        let body = "
        /*0000*/                   IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;   /* 0x00000a00ff017624 */
                                                                            /* 0x000fe400078e00ff */
        /*0010*/              @!P0 LDG.E.128 R4, [R2.64] ;
        /*0020*/                   LDGSTS.E.BYPASS.128 [R3], [R2.64] ;
        /*0030*/                   HMMA.16816.F32.BF16 R4, R8, R2, RZ ;
        /*0040*/                   MUFU.EX2 R3, R4 ;
        /*0050*/                   MUFU.RCP R3, R4 ;
        /*0060*/                   LDSM.16.M88.4 R4, [R5] ;
        /*0070*/               @P1 STL [R1], R4 ;
        /*0080*/                   STG.E [R2.64], R4 ;
        /*0090*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*00a0*/                   UTMALDG.4D [UR8], [UR4], desc[UR6] ;
        /*00b0*/              @P0  UTMASTG.4D [UR8], [UR4] ;
        /*00c0*/                   UBLKCP.S.G [UR8], [UR4], UR6 ;
        /*00d0*/                   EXIT ;";
        let named = |names: &[(&str, u32)]| {
            let named = names.iter().map(|&(name, count)| (name.into(), count));
            named.collect::<BTreeMap<String, u32>>()
        };
        let expected = Counts {
            instructions: 14,
            global_loads: 1,
            global_to_shared: 3,
            shared_to_global: 1,
            global_stores: 1,
            shared_loads: 1,
            local_stores: 1,
            matrix: 2,
            matrix_by: named(&[("HMMA", 1), ("HGMMA", 1)]),
            copies_by: named(&[("LDGSTS", 1), ("UBLKCP", 1), ("UTMALDG", 1), ("UTMASTG", 1)]),
            exponentials: 1,
            ..Counts::default()
        };
        let dump = parse(&format!(
            "\t\tFunction : tw_fa2\n\t.headerflags @\"x\"{body}\n"
        ));
        assert_eq!(dump["tw_fa2"], expected);
        let text = format!(
            "\t.section .text.tw_fa2,\"ax\"\n\t.sectioninfo @\"SHI_REGISTERS=240\"\ntw_fa2:\n.text.tw_fa2:{body}\n"
        );
        let expected = Counts {
            registers: Some(240),
            ..expected
        };
        assert_eq!(parse(&text)["tw_fa2"], expected);
    }
}
