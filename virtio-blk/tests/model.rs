//! Random requests on the device, and the same on a vector of bytes.

mod rig;

use devices::testkit::{self, Buf, reframe};
use proptest::prelude::*;
use rig::*;

const SECTORS: usize = 256;

#[derive(Clone, Debug)]
enum Op {
    Read { sector: usize, sectors: usize },
    Write { sector: usize, sectors: usize, fill: u8 },
    Discard { sector: usize, sectors: usize },
    WriteZeroes { sector: usize, sectors: usize, unmap: bool },
    Flush,
}

/// An operation, the pieces it is cut into, and how its data is misaligned.
type Case = (Op, Vec<u32>, u64);

fn case() -> impl Strategy<Value = Case> {
    // Some of them past the end.
    let place = || (0..SECTORS + 4, 1..48usize);
    let op = prop_oneof![
        place().prop_map(|(sector, sectors)| Op::Read { sector, sectors }),
        (place(), any::<u8>()).prop_map(|((sector, sectors), fill)| Op::Write {
            sector,
            sectors,
            fill
        }),
        place().prop_map(|(sector, sectors)| Op::Discard { sector, sectors }),
        (place(), any::<bool>()).prop_map(|((sector, sectors), unmap)| Op::WriteZeroes {
            sector,
            sectors,
            unmap
        }),
        Just(Op::Flush),
    ];
    let lens = prop::collection::vec(prop_oneof![Just(512u32), 300..30000u32], 1..4);
    (op, lens, prop_oneof![Just(0u64), Just(512u64), 0..4096u64])
}

fn run(rig: &mut Rig, model: &mut [u8], (op, lens, skew): &Case) -> Result<(), TestCaseError> {
    rig.new_arena();
    let (kind, sector, sectors, data_out) = match *op {
        Op::Read { sector, sectors } => (IN, sector, sectors, vec![]),
        Op::Write { sector, sectors, fill } => {
            let data = (0..sectors * SECTOR).map(|at| (at % 241) as u8 ^ fill).collect();
            (OUT, sector, sectors, data)
        }
        Op::Discard { sector, sectors } => {
            (DISCARD, sector, sectors, segment(sector as u64, sectors as u32, 0))
        }
        Op::WriteZeroes { sector, sectors, unmap } => {
            let range = segment(sector as u64, sectors as u32, unmap.into());
            (WRITE_ZEROES, sector, sectors, range)
        }
        Op::Flush => (FLUSH, 0, 0, vec![]),
    };
    let data_in = if kind == IN { sectors * SECTOR } else { 0 };
    let (header, status) =
        (rig.arena.alloc_with(&header(kind, sector as u64)), rig.arena.alloc_with(&[UNTOUCHED]));
    let bytes = data_in.max(data_out.len());
    let data = rig.arena.alloc_at(bytes as u64, 4096, *skew);
    testkit::write(&rig.memory, data, &data_out);
    let mut bufs = vec![Buf::readable(header, 16)];
    let body = Buf { address: data, len_bytes: bytes as u32, writable: kind == IN };
    bufs.extend(reframe(&[body], lens));
    bufs.push(Buf::writable(status, 1));
    let used = rig.send(&bufs);
    rig.arena.check();
    let answer = rig.answer(used, data, data_in, status);

    let range = sector * SECTOR..(sector + sectors) * SECTOR;
    let Some(place) = model.get_mut(range) else {
        prop_assert_eq!(answer.status, IOERR);
        return Ok(());
    };
    prop_assert_eq!(answer.status, OK);
    prop_assert_eq!(answer.used_bytes as usize, data_in + 1);
    match kind {
        IN => prop_assert_eq!(&answer.data, place),
        OUT => place.copy_from_slice(&data_out),
        // What is discarded is undefined to the driver; files read as zero.
        DISCARD | WRITE_ZEROES => place.fill(0),
        _ => {}
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn the_disk_is_a_vector_of_bytes(cases in prop::collection::vec(case(), 1..60)) {
        for (_name, dir, config) in settings() {
            let mut rig = Rig::new(dir, SECTORS, config);
            let mut model = contents(SECTORS);
            for case in &cases {
                run(&mut rig, &mut model, case)?;
            }
            rig.shut_down();
            prop_assert_eq!(rig.on_host(0, SECTORS), model);
        }
    }
}
