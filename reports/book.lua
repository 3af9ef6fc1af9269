-- Both engines: what is neither text nor a picture of ours is taken out of foreign outputs; a pointer over a mark of a
-- figure shows its values; answers are folded. Without Quarto also what it does itself, as far as the book uses it:
-- numbers of figures and tables, and references to them.

local is_html = FORMAT:match("html") ~= nil

local function in_order(facts, ...)  -- attributes of these names; the names of a table have another order in each run
  local kept = pandoc.List()
  for _, name in ipairs({ ... }) do
    if facts[name] then kept:insert({ name, facts[name] }) end
  end
  return kept
end

local function safe(element)  -- no attribute is an event's script
  local given = element.attributes
  if given then element.attributes = in_order(given, "alt", "fig-alt") end
  return element
end

local function is_ours(target) return not (target:match("[:\\]") or target:match("^/") or target:match("%.%.")) end

local function link(element)  -- to the web or within the book; in the PDF what leads to another page is text
  local target = element.target
  if target:match("^notebooks/") then return element.content end  -- a checked number of the abstract
  if target:match("^https?://") or target:match("^#") or is_html and is_ours(target) then return element end
  return element.classes:includes("csv") and {} or element.content
end

-- The boxes that lsai_lab/report/tooltips.py put into an SVG lie over the picture as links: a click opens the run.
local box = '<rect x="([%d.]+%%)" y="([%d.]+%%)" width="([%d.]+%%)" height="([%d.]+%%)" fill="none" '
  .. 'data%-run="([%w%._/,-]*)"><title>([^<>"]*)<'
local tip = '<a class="tip" tabindex="-1" style="--x:%s;--y:%s;--w:%s;--h:%s" %s data-tip="%s"></a>'

local function size_of(source)  -- of a drawing of ours: its text, its width and height in points
  local file = source:match("%.svg$") and io.open(source)
  if not file then return end
  local drawing = file:read("a")
  local width, height = drawing:match('<svg[^>]- width="([%d.]+)pt"'), drawing:match('<svg[^>]- height="([%d.]+)pt"')
  return drawing, tonumber(width), tonumber(height)
end

-- All drawings are shown at one scale, so that their letters are of one size: on paper at five sixths, which makes one
-- panel as wide as a column; on a screen as book.css says.
local PAPER = 5 / 6

local function image(element)
  if not is_ours(element.src) then return pandoc.Emph("(picture left out)") end
  local drawing, width, height = size_of(element.src)
  if FORMAT:match("typst") then
    if width then  -- both, else typst makes one that is too high for its place less high, over its caption
      element.attributes.width = ("%.3fin"):format(PAPER * width / 72)
      element.attributes.height = ("%.3fin"):format(PAPER * height / 72)
    end
    if quarto then return element end
    local alt = (element.attributes.alt or pandoc.utils.stringify(element.caption)):gsub('["\\]', "")  -- pandoc's own writer leaves out the words
    local size = width and (", width: %s, height: %s"):format(element.attributes.width, element.attributes.height) or ""
    return pandoc.RawInline("typst", ('#image("%s", alt: "%s"%s)'):format(element.src, alt, size))
  end
  if not is_html then element.src = element.src:gsub("%.svg$", ".png") end  -- Word
  if not is_html or not drawing then return element end
  local over = '<span aria-hidden="true">'
  for x, y, w, h, run, title in drawing:gmatch(box) do
    local page = run:match(",") and "index.html#" .. run or run .. ".html"  -- of a pair both side by side
    local href = run == "" and "" or ('href="runs/%s"'):format(page)
    over = over .. tip:format(x, y, w, h, href, title)
  end
  local panels = drawing:match('<desc data%-panels="([%d.,;|]*)"')
  local facts = { ["data-panels"] = panels, style = width and "--points: " .. width }
  local classes = { "marked" }
  if width and width > 360 and not panels then classes[2] = "wide" end  -- than a phone
  local about = pandoc.Attr("", classes, in_order(facts, "data-panels", "style"))
  return pandoc.Span({ element, pandoc.RawInline("html", over .. "</span>") }, about)
end

-- An explorable: its picture, for which its script puts controls.
local function explorable(name, inside)
  local head = '<link rel="stylesheet" href="explore/explore.css"><div class="explore" data-explore="%s">'
  local foot = '</div><script defer src="explore/%s.js"></script>'
  local blocks = pandoc.Blocks({ pandoc.RawBlock("html", head:format(name)) })
  blocks:extend(inside)
  blocks:insert(pandoc.RawBlock("html", foot:format(name)))
  return blocks
end

local function on_a_screen(address)  -- what paper cannot do, and where it is
  if not FORMAT:match("typst") then return {} end
  local words = { "Interactive on a screen, in this section: ", pandoc.Code(address), " of the HTML edition." }
  return pandoc.Para({ pandoc.Emph(words) })
end

local wide = "column-page-right"

local function program(element)  -- Quarto's text is narrower than a line of 100 characters
  local longest = 0
  for line in element.text:gmatch("[^\n]+") do longest = math.max(longest, #line) end
  if is_html and quarto and longest > 64 then return pandoc.Div({ element }, { class = wide }) end
end

local function div(element)
  if is_html and element.identifier:match("^tbl%-") then
    for _, block in ipairs(element.content) do
      if block.t == "Table" and #block.colspecs > 8 then element.classes:insert(wide) end
    end
    return element
  end
  if element.classes:includes("quarto-book-part") and FORMAT:match("typst") then  -- typst-show.typ draws it
    local title = pandoc.utils.blocks_to_inlines(element.content, {})  -- Quarto puts an empty paragraph before it
    return pandoc.Plain({ pandoc.RawInline("typst", "#part["), pandoc.Span(title), pandoc.RawInline("typst", "]") })
  end
  if element.classes:includes("quarto-book-part") and not is_html then return {} end  -- Word: no numbered chapter
end

local function explored(element)  -- before its picture is read
  if not element.classes:includes("explore") then return end
  local name = pandoc.utils.stringify(element.content[1] or ""):match("^%l+$")
  if is_html and name then return explorable(name, { element.content[2] }) end
  local chapter
  element:walk({ Image = function(image) chapter = image.src:match("^files/([%w-]-)%-%d+%-%d+%.%l+$") end })
  return chapter and on_a_screen(chapter .. ".html") or {}
end

local function whole(text)  -- a date, a range of numbers: no line ends at its hyphens
  if is_html and text.text:match("^%d[%d.,]*%-[%d%-.,]*%d") then return pandoc.Span({ text }, { class = "whole" }) end
end

local signs, units = { ["≤"] = true, ["≥"] = true, ["="] = true }, { min = true, h = true, s = true, days = true }

local function glued(inlines)  -- in a cell no line ends between a sign, a number and its unit
  for at = 2, #inlines - 1 do
    local before, after = inlines[at - 1].text or "", inlines[at + 1].text or ""
    local one = signs[before] or after == "=" or units[after] and before:match("%d$")
    if inlines[at].t == "Space" and one then inlines[at] = pandoc.Str("\u{a0}") end
  end
  return inlines
end

-- In the PDF a table that waits for the reader's runs is a line: after which command it will stand here.
local function as_a_line(element)
  local rows = FORMAT:match("typst") and element.bodies[1] and element.bodies[1].body or {}
  local head = element.head.rows[1] and pandoc.utils.stringify(element.head.rows[1].cells[1].contents)
  if head ~= "will stand here" or #rows ~= 1 then return end
  local after = pandoc.utils.blocks_to_inlines(rows[1].cells[2].contents)
  local line = pandoc.Plain({ pandoc.Emph("Stands here after "), table.unpack(after) })
  return pandoc.utils.from_simple_table(pandoc.SimpleTable({}, { "AlignLeft" }, { 0 }, {}, { { { line } } }))
end

-- A line of text ends at the spaces of a command, never at the hyphens of a short word in it.
local function code(element)
  if not is_html or not element.text:match("%-") then return end
  local function escaped(text) return (text:gsub("&", "&amp;"):gsub("<", "&lt;"):gsub(">", "&gt;")) end
  local words = element.text:gsub("%S+", function(word)
    local whole = #word <= 30 and word:match("%-")
    return (whole and '<span class="whole">%s</span>' or "%s"):format(escaped(word))
  end)
  return pandoc.RawInline("html", "<code>" .. words .. "</code>")
end

local function as_wide_as_its_words(element)
  local line = as_a_line(element)
  if line then return line end
  for index, spec in ipairs(element.colspecs) do element.colspecs[index] = { spec[1], nil } end
  local before = pandoc.RawInline("typst", "#[]")  -- else typst reads a cell that begins with "= 8" as a heading
  element = element:walk({ Inlines = glued })
  return element:walk({ Str = whole, Plain = function(cell) return pandoc.Plain({ before, table.unpack(cell.content) }) end })
end

local function fold(title, blocks)
  blocks:insert(1, pandoc.RawBlock("html", ("<details><summary>%s</summary>"):format(title)))
  blocks:insert(pandoc.RawBlock("html", "</details>"))
  return blocks
end

local function is_part(block) return block.t == "Div" and block.classes:includes("quarto-book-part") end

local function answer_in(block)  -- the blocks of an answer, without the word
  local inlines = block.t == "BlockQuote" and block.content[1] and block.content[1].content
  if not inlines or pandoc.utils.stringify(inlines[1] or "") ~= "Answer." then return end
  inlines:remove(1)
  return block.content
end

local function quote(element)  -- the reader may try first: on a screen an answer is folded, on paper at the end
  local blocks = is_html and answer_in(element)
  if blocks then return fold("Answer", blocks) end
end

-- In the PDF the answers stand behind all chapters, under their chapters' names, numbered as their exercises: 2.7.1.
local function answers_last(blocks)
  local kept, answers, told, chapter, section, number = pandoc.Blocks({}), pandoc.Blocks({}), 0, 0, 0, ""
  local title
  for _, block in ipairs(blocks) do
    local first = block.t == "Para" and block.content[1]
    local answer = answer_in(block)
    if block.t == "Header" and block.level == 1 then chapter, section, title = chapter + 1, 0, block.content end
    if block.t == "Header" and block.level == 2 then section = section + 1 end
    if first and first.t == "Strong" then number = pandoc.utils.stringify(first):match("^%d+%.") or "" end
    if not answer then kept:insert(block) end
    if answer and told < chapter then
      answers:insert(pandoc.Para({ pandoc.Strong({ tostring(chapter), "\u{2002}", table.unpack(title) }) }))
      told = chapter
    end
    if answer then
      local whole_number = ("%d.%d.%s "):format(chapter, section, number)
      answer[1].content = { pandoc.Strong(whole_number), table.unpack(answer[1].content) }
    end
    answers:extend(answer or {})
  end
  if #answers > 0 then
    kept:insert(pandoc.Header(1, "Answers", pandoc.Attr("answers", { "unnumbered" })))
    kept:extend(answers)
  end
  return kept
end

local words, labels, numbers, counts = { fig = "Figure", tbl = "Table", sec = "Section" }, {}, {}, {}

local function header(element)
  local level = element.level
  numbers = { table.unpack(numbers, 1, level) }
  numbers[level] = (numbers[level] or 0) + 1
  if level == 1 then counts = {} end
  labels[element.identifier] = (level == 1 and "Chapter" or words.sec) .. "\u{a0}" .. table.concat(numbers, ".")
end

local function float(element)
  local kind = element.identifier:match("^(%a+)%-")
  if not words[kind] then return end
  counts[kind] = (counts[kind] or 0) + 1
  labels[element.identifier] = ("%s\u{a0}%d.%d"):format(words[kind], numbers[1], counts[kind])
  local caption = element.content:remove()
  caption.content = { pandoc.Strong(labels[element.identifier] .. "."), " ", table.unpack(caption.content) }
  local classes = kind .. (element.classes:includes(wide) and " " .. wide or "")
  return pandoc.Figure(element.content, { caption }, { id = element.identifier, class = classes }), false
end

local function cite(element)  -- a reference stands alone: `@fig-speed`, or `[-@fig-speed]` for its number
  local id, mode = element.citations[1].id, element.citations[1].mode
  if not words[id:match("^(%a+)%-") or ""] then return end
  if not labels[id] then return pandoc.Emph(id .. " (not measured here)") end
  return pandoc.Link(mode == "SuppressAuthor" and labels[id]:match("[%d.]+$") or labels[id], "#" .. id)
end

local function para(element)  -- a page of ours, linked alone, is shown in place; paper cannot
  local only = #element.content == 1 and element.content[1]
  if only and only.t == "Strong" and FORMAT:match("typst") then  -- a title of what follows
    return { pandoc.RawBlock("typst", "#block(sticky: true)["), element, pandoc.RawBlock("typst", "]") }
  end
  if not only or only.t ~= "Link" or not only.target:match("^%.?/?runs/[%w/]+%.html$") then return end
  if is_html and only.target:match("runs/fits%.html$") then return explorable("fits", { element }) end
  if not is_html then return on_a_screen(only.target) end
  local frame = '<iframe loading="lazy" title="%s" src="%s"></iframe>'
  local title = pandoc.utils.stringify(only.content):gsub('[<>&"]', "")
  return { pandoc.RawBlock("html", frame:format(title, only.target)), element }
end

-- In the PDF a part's name, a chapter's heading and its first paragraph stay together.
local function whole_beginnings(blocks)
  blocks = blocks:filter(function(block) return block.t ~= "Para" or #block.content > 0 end)
  local at = 1
  while blocks[at] do
    if blocks[at].t == "Header" and blocks[at].level == 1 then
      local first = blocks[at - 1] and is_part(blocks[at - 1]) and at - 1 or at
      local last = blocks[at + 1] and blocks[at + 1].t == "Para" and at + 1 or at
      blocks:insert(last + 1, pandoc.RawBlock("typst", "]"))
      blocks:insert(first, pandoc.RawBlock("typst", "#chapter["))
      at = last + 1
    end
    at = at + 1
  end
  return blocks
end

local function declared()  -- the keywords of the package
  local file = io.open("../CITATION.cff")
  return file and pandoc.read("---\n" .. file:read("a") .. "\n---\n", "markdown").meta.keywords
end

function Pandoc(doc)
  doc.meta.keywords = doc.meta.keywords or declared()
  local none = function() return {} end
  doc = doc:walk({ Block = safe, Inline = safe, RawBlock = none, RawInline = none })
  if FORMAT:match("typst") then doc.blocks = whole_beginnings(answers_last(doc.blocks)) end
  local shown = { Div = div, Link = link, Image = image, Table = as_wide_as_its_words, CodeBlock = program, Code = code }
  doc = doc:walk({ Para = para, Div = explored }):walk(shown):walk({ BlockQuote = quote })
  if not quarto then return doc:walk({ traverse = "topdown", Header = header, Div = float }):walk({ Cite = cite }) end
  return doc
end
