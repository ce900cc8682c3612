//! What the device answers: every rule of virtio 1.2, 5.2.6, by the driver in software.

mod rig;

use std::os::unix::fs::MetadataExt;

use devices::testkit::{self, Buf, reframe};
use devices::virtio::VirtioDevice;
use rig::*;
use virtio_blk::{BlkConfig, EngineKind};

const F_DISCARD: u64 = 1 << 13;
const F_WRITE_ZEROES: u64 = 1 << 14;

fn sync() -> BlkConfig {
    BlkConfig { engine: EngineKind::Sync, ..BlkConfig::default() }
}

fn rig(sectors: usize) -> Rig {
    Rig::new(on_disk(), sectors, sync())
}

#[test]
fn used_lengths_count_the_data_and_the_status_byte() {
    for (name, dir, config) in settings() {
        let mut rig = Rig::new(dir, 64, config);
        let read = rig.request(IN, 8, &[], 4096);
        assert_eq!((read.status, read.used_bytes), (OK, 4097), "{name}");
        assert_eq!(read.data, contents(64)[8 * SECTOR..16 * SECTOR], "{name}");
        let write = rig.request(OUT, 8, &[7; 1024], 0);
        assert_eq!((write.status, write.used_bytes), (OK, 1), "{name}");
        assert_eq!(rig.on_host(8, 2), [7; 1024], "{name}");
        let flush = rig.request(FLUSH, 0, &[], 0);
        assert_eq!((flush.status, flush.used_bytes), (OK, 1), "{name}");
        let id = rig.request(GET_ID, 0, &[], 20);
        assert_eq!((id.status, id.used_bytes), (OK, 21), "{name}");
    }
}

#[test]
fn a_failed_read_claims_no_data_and_bounds_are_checked_without_overflow() {
    let mut rig = rig(64);
    for sector in [64, 57, u64::MAX, u64::MAX / 512, u64::MAX / 512 + 1, 1 << 55] {
        let read = rig.request(IN, sector, &[], 4096);
        assert_eq!((read.status, read.used_bytes), (IOERR, 0), "sector {sector}");
        assert_eq!(read.data, [0; 4096], "sector {sector}");
        let write = rig.request(OUT, sector, &[9; 4096], 0);
        assert_eq!((write.status, write.used_bytes), (IOERR, 1), "sector {sector}");
    }
    assert_eq!(rig.request(IN, 56, &[], 4096).status, OK, "the last sectors are there");
    assert_eq!(rig.on_host(0, 64), contents(64));
}

#[test]
fn what_the_driver_wrote_for_the_device_stays_as_it_was() {
    for (name, dir, config) in settings() {
        let packed = config.packed;
        let mut rig = Rig::new(dir, 64, config);
        let zeroes = segment(8, 8, 1);
        for (kind, out, into) in [
            (IN, &[][..], 4096),
            (OUT, &[7; 1024], 0),
            (GET_ID, &[], 20),
            (WRITE_ZEROES, &zeroes, 0),
            (77, &[5; 99], 0),
        ] {
            let (bufs, ..) = rig.parts(kind, 0, out, into);
            rig.drivers[0].add(&bufs);
            let ring = rig.drivers[0].config();
            // In a packed ring used descriptors take the place of those of the driver.
            let table_bytes = if packed { 0 } else { 16 * usize::from(ring.size) };
            let table = testkit::read(&rig.memory, ring.desc, table_bytes);
            rig.publish(0);
            rig.drivers[0].wait_used();
            assert_eq!(testkit::read(&rig.memory, ring.desc, table_bytes), table, "{name} {kind}");
            // The header lies where the first descriptor says, what is written out behind it.
            let mut expect = header(kind, 0);
            expect.extend(out);
            let readable: Vec<u8> = bufs
                .iter()
                .filter(|buf| !buf.writable)
                .flat_map(|buf| testkit::read(&rig.memory, buf.address, buf.len_bytes as usize))
                .collect();
            assert_eq!(readable, expect, "{name} {kind}");
        }
    }
}

#[test]
fn data_that_is_not_whole_sectors_is_an_error() {
    let mut rig = rig(64);
    for bytes in [1, 511, 513, 4095] {
        assert_eq!(rig.request(IN, 0, &[], bytes).status, IOERR, "{bytes}");
        assert_eq!(rig.request(OUT, 0, &vec![9; bytes], 0).status, IOERR, "{bytes}");
    }
    assert_eq!(rig.on_host(0, 64), contents(64));
}

#[test]
fn a_flush_takes_no_notice_of_a_sector_or_of_data() {
    let mut rig = rig(8);
    for (sector, out, into) in [(u64::MAX, vec![], 0), (0, vec![9; 513], 0), (0, vec![], 99)] {
        let flush = rig.request(FLUSH, sector, &out, into);
        assert_eq!((flush.status, flush.data), (OK, vec![0; into]));
    }
    assert_eq!(rig.on_host(0, 8), contents(8));
}

#[test]
fn the_id_is_the_serial_padded_with_zeros() {
    let mut rig = Rig::new(on_disk(), 8, BlkConfig { serial: "POLLUX-1".into(), ..sync() });
    let id = rig.request(GET_ID, 0, &[], 20);
    assert_eq!(id.data, *b"POLLUX-1\0\0\0\0\0\0\0\0\0\0\0\0");
    let longer = rig.request(GET_ID, 0, &[], 40);
    assert_eq!((longer.status, longer.used_bytes), (OK, 20), "the status byte is not adjacent");
    assert_eq!(rig.request(GET_ID, 0, &[], 19).status, IOERR);
}

#[test]
fn unknown_types_are_unsupported() {
    let mut rig = rig(8);
    for kind in [2, 3, 5, 10, 14, 15, 0x8000_0000, u32::MAX] {
        let answer = rig.request(kind, 0, &[], 0);
        assert_eq!((answer.status, answer.used_bytes), (UNSUPP, 1), "type {kind}");
    }
}

#[test]
fn any_framing_is_accepted() {
    for (name, dir, config) in settings() {
        let mut rig = Rig::new(dir, 64, config);
        for lens in [&[1u32][..], &[7, 9], &[15, 500, 0, 3], &[u32::MAX]] {
            let expect = rig.on_host(3, 1);
            let (bufs, into, status) = rig.parts(IN, 3, &[], SECTOR);
            let bufs = if lens == [1] {
                // One descriptor a byte: only what fits the queue.
                let mut pieces = reframe(&bufs[..1], lens);
                pieces.extend(&bufs[1..]);
                pieces
            } else {
                reframe(&bufs, lens)
            };
            let used = rig.send(&bufs);
            let answer = rig.answer(used, into, SECTOR, status);
            assert_eq!((answer.status, answer.used_bytes), (OK, 513), "{name} {lens:?}");
            assert_eq!(answer.data, expect, "{name} {lens:?}");

            let data: Vec<u8> = (0..1024).map(|at| (at % 251) as u8).collect();
            let (bufs, _, status) = rig.parts(OUT, 5, &data, 0);
            let bufs = if lens == [1] { bufs } else { reframe(&bufs, lens) };
            rig.send(&bufs);
            assert_eq!(testkit::read(&rig.memory, status, 1), [OK], "{name} {lens:?}");
            assert_eq!(rig.on_host(5, 2), data, "{name} {lens:?}");
            rig.arena.check();
        }
    }
}

#[test]
fn header_and_data_may_share_a_descriptor_and_data_and_status_too() {
    for (name, dir, config) in settings() {
        let mut rig = Rig::new(dir, 64, config);
        let mut out = header(OUT, 4);
        out.extend([0x5a; 2 * SECTOR]);
        let (out, status) = (rig.arena.alloc_with(&out), rig.arena.alloc_with(&[UNTOUCHED]));
        let used =
            rig.send(&[Buf::readable(out, 16 + 2 * SECTOR as u32), Buf::writable(status, 1)]);
        assert_eq!(used.written_bytes, 1, "{name}");
        assert_eq!(testkit::read(&rig.memory, status, 1), [OK], "{name}");
        assert_eq!(rig.on_host(4, 2), [0x5a; 2 * SECTOR], "{name}");

        let (ask, into) = (rig.arena.alloc_with(&header(IN, 4)), rig.arena.alloc(513));
        let used = rig.send(&[Buf::readable(ask, 16), Buf::writable(into, 513)]);
        assert_eq!(used.written_bytes, 513, "{name}");
        let mut expect = vec![0x5a; SECTOR];
        expect.push(OK);
        assert_eq!(testkit::read(&rig.memory, into, 513), expect, "{name}");
        rig.arena.check();
    }
}

#[test]
fn as_many_data_descriptors_as_the_queue_holds() {
    for (name, dir, config) in settings() {
        let mut rig = Rig::new(dir, 512, config);
        let (bufs, into, status) = rig.parts(IN, 0, &[], 254 * SECTOR);
        // 254 pieces of a sector each, the header and the status: 256 descriptors.
        let mut chain = vec![bufs[0]];
        chain.extend(reframe(&bufs[1..2], &[SECTOR as u32]));
        chain.push(bufs[2]);
        assert_eq!(chain.len(), 256);
        let used = rig.send(&chain);
        let answer = rig.answer(used, into, 254 * SECTOR, status);
        assert_eq!(answer.status, OK, "{name}");
        assert_eq!(answer.data, contents(254), "{name}");
    }
}

#[test]
fn as_many_buffers_as_the_queue_has_room_for() {
    for (name, dir, config) in settings() {
        let mut rig = Rig::new(dir, 1022, BlkConfig { queue_size: 1024, ..config });
        let (bufs, into, status) = rig.parts(IN, 0, &[], 1022 * SECTOR);
        let mut chain = vec![bufs[0]];
        chain.extend(reframe(&bufs[1..2], &[SECTOR as u32]));
        chain.push(bufs[2]);
        let used = rig.send(&chain);
        let answer = rig.answer(used, into, 1022 * SECTOR, status);
        assert_eq!((answer.status, answer.used_bytes), (OK, 1022 * SECTOR as u32 + 1), "{name}");
        assert_eq!(answer.data, contents(1022), "{name}");
    }
}

#[test]
fn indirect_chains_work_like_direct_ones() {
    for (name, dir, config) in settings() {
        let mut rig = Rig::new(dir, 64, config);
        let (bufs, into, status) = rig.parts(IN, 1, &[], SECTOR);
        rig.drivers[0].add_indirect(&bufs);
        rig.publish(0);
        let used = rig.drivers[0].wait_used();
        let answer = rig.answer(used, into, SECTOR, status);
        assert_eq!((answer.status, answer.used_bytes), (OK, 513), "{name}");
        assert_eq!(answer.data, rig.on_host(1, 1), "{name}");
    }
}

#[test]
fn buffers_that_o_direct_does_not_take_are_bounced() {
    for (name, dir, config) in settings() {
        let mut rig = Rig::new(dir, 2048, config);
        // 13 sectors in two buffers at odd addresses, as field reports have them.
        let bytes = 13 * SECTOR;
        assert_eq!(3952 + 2704, bytes);
        let into = [rig.arena.alloc_at(3952, 4096, 144), rig.arena.alloc_at(2704, 4096, 1)];
        let (parts, _, status) = rig.parts(IN, 16, &[], 0);
        let used = rig.send(&[
            parts[0],
            Buf::writable(into[0], 3952),
            Buf::writable(into[1], 2704),
            parts[1],
        ]);
        assert_eq!(used.written_bytes, bytes as u32 + 1, "{name}");
        assert_eq!(testkit::read(&rig.memory, status, 1), [OK], "{name}");
        let mut data = testkit::read(&rig.memory, into[0], 3952);
        data.extend(testkit::read(&rig.memory, into[1], 2704));
        assert_eq!(data, rig.on_host(16, 13), "{name}");

        // And back, elsewhere.
        let (parts, _, status) = rig.parts(OUT, 101, &[], 0);
        rig.send(&[parts[0], Buf::readable(into[0], 3952), Buf::readable(into[1], 2704), parts[1]]);
        assert_eq!(testkit::read(&rig.memory, status, 1), [OK], "{name}");
        assert_eq!(rig.on_host(101, 13), data, "{name}");

        // Longer than the bounce buffer, at an odd address.
        let long = rig.arena.alloc_at(600 * SECTOR as u64, 4096, 3);
        let (parts, _, status) = rig.parts(IN, 1000, &[], 0);
        rig.send(&[parts[0], Buf::writable(long, 600 * SECTOR as u32), parts[1]]);
        assert_eq!(testkit::read(&rig.memory, status, 1), [OK], "{name}");
        assert_eq!(
            testkit::read(&rig.memory, long, 600 * SECTOR),
            rig.on_host(1000, 600),
            "{name}"
        );
        rig.arena.check();
    }
}

#[test]
fn a_chain_without_a_writable_byte_comes_back_with_length_zero_and_does_nothing() {
    let mut rig = rig(64);
    let mut bytes = header(OUT, 0);
    bytes.extend([9; SECTOR]);
    let out = rig.arena.alloc_with(&bytes);
    let used = rig.send(&[Buf::readable(out, bytes.len() as u32)]);
    assert_eq!(used.written_bytes, 0);
    assert_eq!(rig.on_host(0, 64), contents(64));
    assert_eq!(rig.signals.status() & 0x40, 0);
    assert_eq!(rig.read(0, 1), contents(1), "the queue works on");
}

#[test]
fn a_chain_too_short_for_a_header_is_an_error() {
    let mut rig = rig(64);
    let (short, status) = (rig.arena.alloc(15), rig.arena.alloc_with(&[UNTOUCHED]));
    let used = rig.send(&[Buf::readable(short, 15), Buf::writable(status, 1)]);
    assert_eq!(used.written_bytes, 1);
    assert_eq!(testkit::read(&rig.memory, status, 1), [IOERR]);
    let used = rig.send(&[Buf::writable(status, 1)]);
    assert_eq!(used.written_bytes, 1);
    assert_eq!(testkit::read(&rig.memory, status, 1), [IOERR]);
    rig.arena.check();
}

#[test]
fn read_only_binds_whatever_was_accepted_and_blocks_nothing_else() {
    let readonly = BlkConfig { readonly: true, serial: "RO".into(), ..sync() };
    for accept in [u64::MAX, !(1 << 5)] {
        let mut rig = Rig::with_features(on_disk(), 64, readonly.clone(), accept);
        assert_eq!(rig.block.features() & (1 << 5), 1 << 5);
        assert_eq!(rig.request(OUT, 0, &[9; SECTOR], 0).status, IOERR);
        assert_eq!(rig.on_host(0, 64), contents(64));
        assert_eq!(rig.read(0, 64), contents(64));
        assert_eq!(rig.request(GET_ID, 0, &[], 20).data[..2], *b"RO");
        assert_eq!(rig.request(FLUSH, 0, &[], 0).status, OK);
        for kind in [DISCARD, WRITE_ZEROES] {
            assert_ne!(rig.request(kind, 0, &segment(0, 8, 0), 0).status, OK);
        }
        assert_eq!(rig.on_host(0, 64), contents(64));
    }
}

#[test]
fn discard_frees_space_and_write_zeroes_obeys_unmap() {
    for (name, dir, config) in settings() {
        let mut rig = Rig::new(dir, 256, config);
        let blocks = |rig: &Rig| rig.image.as_file().metadata().unwrap().blocks();
        rig.request(FLUSH, 0, &[], 0);
        let full = blocks(&rig);

        let zeroes = rig.request(WRITE_ZEROES, 0, &segment(64, 64, 0), 0);
        assert_eq!((zeroes.status, zeroes.used_bytes), (OK, 1), "{name}");
        assert_eq!(rig.read(64, 64), vec![0; 64 * SECTOR], "{name}");
        assert_eq!(blocks(&rig), full, "{name}: without unmap the space stays");

        assert_eq!(rig.request(WRITE_ZEROES, 0, &segment(64, 64, 1), 0).status, OK, "{name}");
        assert_eq!(rig.read(64, 64), vec![0; 64 * SECTOR], "{name}");
        assert_eq!(blocks(&rig), full - 64, "{name}: with unmap it is freed");

        let mut both = segment(128, 16, 0);
        both.extend(segment(192, 16, 0));
        let discard = rig.request(DISCARD, 0, &both, 0);
        assert_eq!((discard.status, discard.used_bytes), (OK, 1), "{name}");
        assert_eq!(blocks(&rig), full - 96, "{name}: both segments");

        // Ranges of odd sectors, beside which everything stays.
        assert_eq!(rig.request(WRITE_ZEROES, 0, &segment(3, 17, 0), 0).status, OK, "{name}");
        let mut expect = contents(64);
        expect[3 * SECTOR..20 * SECTOR].fill(0);
        assert_eq!(rig.read(0, 64), expect, "{name}");
        assert_eq!(rig.image.as_file().metadata().unwrap().len(), 256 * 512, "{name}");
    }
}

#[test]
fn zeros_are_written_in_pieces_where_the_file_system_cannot_zero() {
    // tmpfs has no FALLOC_FL_ZERO_RANGE.
    for engine in [EngineKind::Uring, EngineKind::Sync] {
        let mut rig = Rig::new(on_tmpfs(), 3000, BlkConfig { engine, ..BlkConfig::default() });
        let (mut ranges, mut expect) = (segment(1, 2001, 0), contents(3000));
        ranges.extend(segment(2500, 1, 0));
        assert_eq!(rig.request(WRITE_ZEROES, 0, &ranges, 0).status, OK);
        expect[SECTOR..2002 * SECTOR].fill(0);
        expect[2500 * SECTOR..2501 * SECTOR].fill(0);
        assert_eq!(rig.on_host(0, 3000), expect);
    }
}

#[test]
fn discard_and_write_zeroes_check_everything_before_they_do_anything() {
    let mut rig = rig(64);
    let good = segment(0, 8, 0);
    let flag_in = |bad: u64| (0..17).flat_map(|n| segment(0, 8, 2 * u32::from(n == bad))).collect();
    let cases: &[(&str, u32, Vec<u8>, u8)] = &[
        ("unmap on discard", DISCARD, segment(0, 8, 1), UNSUPP),
        ("unknown flag on discard", DISCARD, segment(0, 8, 2), UNSUPP),
        ("unknown flag", WRITE_ZEROES, segment(0, 8, 2), UNSUPP),
        ("unknown flag beside unmap", WRITE_ZEROES, segment(0, 8, 0x8000_0001), UNSUPP),
        ("past the end", DISCARD, segment(60, 5, 0), IOERR),
        ("overflow", WRITE_ZEROES, segment(u64::MAX, 2, 0), IOERR),
        ("too long", WRITE_ZEROES, segment(0, u32::MAX, 0), IOERR),
        ("no segment", DISCARD, vec![], IOERR),
        ("half a segment", DISCARD, good[..8].to_vec(), IOERR),
        ("a segment and a half", WRITE_ZEROES, [&good[..], &good[..8]].concat(), IOERR),
        ("17 segments", DISCARD, good.repeat(17), IOERR),
        ("the second one is bad", WRITE_ZEROES, [good.clone(), segment(64, 1, 0)].concat(), IOERR),
        ("and of a bad flag", DISCARD, [segment(99, 1, 0), segment(0, 1, 4)].concat(), UNSUPP),
        (
            "a bad flag before half",
            DISCARD,
            [segment(0, 8, 1), good[..8].to_vec()].concat(),
            UNSUPP,
        ),
        ("17, the first of a bad flag", DISCARD, segment(0, 8, 2).repeat(17), UNSUPP),
        ("17, the 16th of one", WRITE_ZEROES, flag_in(15), UNSUPP),
        ("17, the last of one, which is one too many", WRITE_ZEROES, flag_in(16), IOERR),
    ];
    for (name, kind, data, status) in cases {
        assert_eq!(rig.request(*kind, 0, data, 0).status, *status, "{name}");
        assert_eq!(rig.on_host(0, 64), contents(64), "{name}");
    }
    assert_eq!(rig.request(WRITE_ZEROES, 0, &good.repeat(16), 0).status, OK, "16 are allowed");
}

#[test]
fn what_was_not_negotiated_is_unsupported() {
    let accept = !(F_DISCARD | F_WRITE_ZEROES);
    let mut rig = Rig::with_features(on_disk(), 64, sync(), accept);
    assert_eq!(rig.request(DISCARD, 0, &segment(0, 8, 0), 0).status, UNSUPP);
    assert_eq!(rig.request(WRITE_ZEROES, 0, &segment(0, 8, 0), 0).status, UNSUPP);
    let off = Rig::new(on_disk(), 64, BlkConfig { discard: false, ..sync() });
    assert_eq!(off.block.features() & (F_DISCARD | F_WRITE_ZEROES), 0);
}

#[test]
fn an_error_of_the_host_ends_one_request_and_nothing_else() {
    for (name, dir, config) in settings() {
        let mut rig = Rig::new(dir, 64, config);
        rig.image.as_file().set_len(16 * 512).unwrap();
        let lost = rig.request(IN, 32, &[], 4096);
        assert_eq!((lost.status, lost.used_bytes), (IOERR, 0), "{name}");
        assert_eq!(rig.request(IN, 12, &[], 4096).status, IOERR, "{name}: half of it is there");
        assert_eq!(rig.read(0, 16), contents(16), "{name}");
        assert_eq!(rig.block.counters()[0].errors.get(), 2, "{name}");
    }
}

#[test]
fn writes_are_seen_by_reads_in_every_cache_mode() {
    for cache in [virtio_blk::CacheMode::Writeback, virtio_blk::CacheMode::Writethrough] {
        for (name, dir, config) in settings() {
            let mut rig = Rig::new(dir, 64, BlkConfig { cache, ..config });
            rig.write(7, &[0x77; 3 * SECTOR]);
            assert_eq!(rig.read(7, 3), [0x77; 3 * SECTOR], "{name}");
            let discard = rig.request(DISCARD, 0, &segment(0, 4, 0), 0);
            assert_eq!(discard.status, OK, "{name}");
            let zeroes = rig.request(WRITE_ZEROES, 0, &segment(7, 1, 0), 0);
            assert_eq!(zeroes.status, OK, "{name}");
            assert_eq!(rig.read(7, 1), [0; SECTOR], "{name}");
        }
    }
}

#[test]
fn the_null_engine_answers_and_moves_nothing() {
    let null = BlkConfig { engine: EngineKind::Null, ..BlkConfig::default() };
    let mut rig = Rig::new(on_disk(), 64, null);
    let read = rig.request(IN, 0, &[], 4096);
    assert_eq!((read.status, read.used_bytes), (OK, 4097));
    assert_eq!(read.data, [0; 4096]);
    assert_eq!(rig.request(OUT, 0, &[9; SECTOR], 0).status, OK);
    assert_eq!(rig.on_host(0, 64), contents(64));
    assert_eq!(rig.request(IN, 64, &[], SECTOR).status, IOERR, "the rules hold nevertheless");
}
